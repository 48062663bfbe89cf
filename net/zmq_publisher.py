"""A publisher of messages on a ZeroMQ socket, from an event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import zmq
import zmq.asyncio

from kvrelay.net.door_rules import KV_EVENTS

_log = logging.getLogger(__name__)

_MOST_UNREAD_MESSAGES: Final = 128
_LONGEST_MESSAGE_BYTES: Final = KV_EVENTS.most_bytes or 0
"""The most bytes of a subscriber's message: a topic or the greeting. More disconnect it."""
_MOST_TOPICS: Final = KV_EVENTS.methods["SUBSCRIBE"].most or 0
_MESSAGES_A_TURN: Final = 64
_MOST_MESSAGES_IN_A_ROW: Final = 4096
"""The most messages read in a row without a wait; more come faster than the loop reads them."""
_RETRY_SECONDS: Final = 0.05
_TRIES_BEFORE_WARNING: Final = 20


class ZmqPublisher:
    """A publisher that sends messages to the subscribers of their topic and waits for none.

    It is an XPUB socket, to which SUB sockets connect: a PUB socket does not tell whether anybody
    has subscribed. A subscriber that has `_MOST_UNREAD_MESSAGES` to read misses more.

    libzmq would keep all topics and all unread subscriptions. So if subscribers name more than
    `_MOST_TOPICS`, or send faster than it reads, it disconnects all of them. It then listens again
    on the same port. The number of connections has no bound. Use it on one event loop.

    Args:
        topic: the first frame of every message.
    """

    def __init__(self, topic: bytes = b"") -> None:
        self._topic = topic
        self._topics: set[bytes] = set()
        self._is_wanted = False
        self._context = zmq.asyncio.Context()
        self._socket = self._new_socket()
        self._reading: asyncio.Task[None] | None = None

    @property
    def had_subscribers(self) -> bool:
        """Whether anybody has ever subscribed to the published topic; for any thread.

        It stays true when they leave, because libzmq's report of a subscription's end proves
        nothing. A connection may end one that it never had, while others still listen.
        """
        return self._is_wanted

    async def start(self, host: str) -> int:
        """Listen on a free port; return the port.

        Raises:
            OSError: the host is not an address of this machine.
        """
        loop = asyncio.get_running_loop()
        family, _, _, _, address = (await loop.getaddrinfo(host, 0))[0]
        shown = f"[{address[0]}]" if family.name == "AF_INET6" else address[0]
        try:
            self._socket.bind(f"tcp://{shown}:0")
        except zmq.ZMQError as error:
            raise OSError(f"cannot listen on {host}: {error}") from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reading = asyncio.create_task(self._read_subscriptions(endpoint))
        return int(endpoint.rpartition(":")[2])

    def publish(self, *frames: bytes) -> None:
        """Send the topic and these frames as a message, at once; do nothing after `close`."""
        if not self._socket.closed:
            self._socket.send_multipart((self._topic, *frames), zmq.DONTWAIT)

    async def close(self) -> None:
        """Close the port and every connection; unread messages are lost."""
        try:
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.gather(self._reading, return_exceptions=True)
        finally:
            self._is_wanted = False
            self._socket.close(linger=0)
            self._context.term()

    def _new_socket(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, _MOST_UNREAD_MESSAGES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(KV_EVENTS.begin_seconds * 1000))
        socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_MESSAGE_BYTES)
        return socket

    async def _read_subscriptions(self, endpoint: str) -> None:
        """Note the topics; let other tasks run after every `_MESSAGES_A_TURN` messages."""
        in_a_row = 0
        while True:
            message = asyncio.ensure_future(self._socket.recv())
            in_a_row = in_a_row + 1 if message.done() else 0
            self._note(await message)
            if in_a_row % _MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)  # to await what is done already lets nobody else run
            if len(self._topics) > _MOST_TOPICS or in_a_row > _MOST_MESSAGES_IN_A_ROW:
                _log.warning("%s: too many topics or messages of subscribers", endpoint)
                await self._listen_anew(endpoint)
                in_a_row = 0

    def _note(self, message: bytes) -> None:
        """Note a topic: a leading 1 begins a subscription, a 0 ends one."""
        if message[:1] == b"\1":
            self._topics.add(message[1:])
            self._is_wanted |= self._topic.startswith(message[1:])
        elif message[:1] == b"\0":
            self._topics.discard(message[1:])

    async def _listen_anew(self, endpoint: str) -> None:
        """Disconnect everybody and listen again; try until that succeeds."""
        self._socket.close(linger=0)
        self._topics.clear()
        tries = 0
        while True:  # the port is free once libzmq's thread has closed the old socket
            try:
                self._socket = self._new_socket()
                self._socket.bind(endpoint)
            except zmq.ZMQError as error:
                self._socket.close(linger=0)
                tries += 1
                if tries == _TRIES_BEFORE_WARNING:
                    _log.warning("%s: cannot listen, still trying: %s", endpoint, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return
