"""A bound on answers that wait to be read, and the hang-up on whoever reads nothing.

gRPC cannot reset one call whose answer is stuck behind a closed window: a status waits behind the
answer. So the connection is closed under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

_log = logging.getLogger(__name__)
_STATE_BYTES: Final = 32 << 10
"""The bytes counted for a call besides its answer."""
MOST_BYTES: Final = 64 << 20
"""The most bytes of all unread answers; for more, whoever has most of them is hung up on."""
MOST_STUCK_OF_A_CONNECTION: Final = 8
"""The most answers of a connection that wait for too long; a proxy may have some slow clients."""
MOST_STUCK: Final = 256
"""The most answers of all connections that wait for too long."""
_LEAST_WAIT_SECONDS: Final = 1.0
"""The least wait of an answer that may be given up for other calls: who reads reads sooner."""
_PAUSE_SECONDS: Final = 0.1
"""The pause between two looks at all connections of the process."""


class _Unread:
    """One answer that waits to be read."""

    def __init__(self, peer: str, method: str, num_bytes: int) -> None:
        self.peer = peer
        self.method = method
        self.num_bytes = num_bytes + _STATE_BYTES
        self.since = asyncio.get_running_loop().time()
        self.stuck = False


class UnreadAnswers:
    """The answers that wait to be read, on the connections of one server.

    Args:
        hang_up: closes the connections of these peers; peers are named as gRPC names them.
    """

    def __init__(self, hang_up: Callable[[str], None]) -> None:
        self._hang_up = hang_up
        self._waiting: dict[_Unread, None] = {}  # the oldest first
        self._num_bytes: Counter[str] = Counter()  # by peer
        self._stuck: Counter[str] = Counter()  # by peer

    @contextlib.contextmanager
    def waiting(self, peer: str, method: str, num_bytes: int, seconds: float) -> Iterator[None]:
        """A context in which an answer waits to be read; after `seconds` it waits for too long."""
        unread = _Unread(peer, method, num_bytes)
        self._waiting[unread] = None
        self._num_bytes[peer] += unread.num_bytes
        if self._num_bytes.total() > MOST_BYTES:
            self._end_most(self._num_bytes)
        timer = asyncio.get_running_loop().call_later(seconds, self._is_stuck, unread)
        try:
            yield
        finally:
            timer.cancel()
            self._forget(unread)

    def end_oldest(self, method: str) -> None:
        """Hang up on the peer whose answer of a method has waited longest, if any waits long."""
        oldest = next((one for one in self._waiting if one.method == method), None)
        now = asyncio.get_running_loop().time()
        if oldest is not None and now - oldest.since >= _LEAST_WAIT_SECONDS:
            self._end(oldest.peer)

    def _is_stuck(self, unread: _Unread) -> None:
        if unread not in self._waiting:  # its peer was hung up on just now
            return
        unread.stuck = True
        self._stuck[unread.peer] += 1
        if self._stuck[unread.peer] >= MOST_STUCK_OF_A_CONNECTION:
            self._end(unread.peer)
        elif self._stuck.total() > MOST_STUCK:
            self._end_most(self._stuck)

    def _end_most(self, counted: Counter[str]) -> None:
        [(peer, _)] = counted.most_common(1)
        self._end(peer)

    def _end(self, peer: str) -> None:
        """Hang up; the answers of the peer no longer count, as they end soon."""
        for unread in [one for one in self._waiting if one.peer == peer]:
            self._forget(unread)
        self._hang_up(peer)

    def _forget(self, unread: _Unread) -> None:
        if unread not in self._waiting:
            return
        del self._waiting[unread]
        _subtract(self._num_bytes, unread.peer, unread.num_bytes)
        if unread.stuck:
            _subtract(self._stuck, unread.peer, 1)


def _subtract(counted: Counter[str], peer: str, number: int) -> None:
    counted[peer] -= number
    if not counted[peer]:
        del counted[peer]


class HangUps:
    """The hang-ups of a server: connections of this process, closed by their peers' addresses.

    Only the peer's address is known, so all files of the process are looked at, on a thread.
    """

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    def __call__(self, peer: str) -> None:
        """Close the connection with a peer, such as ``ipv4:127.0.0.1:4711``, soon."""
        self._peers.add(peer)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            while self._peers:
                peers, self._peers = self._peers, set()
                try:
                    await asyncio.to_thread(_close_connections, {_address(one) for one in peers})
                except OSError as error:  # no more files
                    _log.warning("cannot hang up on %d connections yet: %s", len(peers), error)
                    self._peers |= peers
                else:
                    _log.info("hung up on %d connections that take too much", len(peers))
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._looking = None


def _address(peer: str) -> tuple[str, int]:
    """The host and the port of a peer as gRPC names it."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def _close_connections(addresses: Set[tuple[str, int]]) -> None:
    """Shut down every connection of this process with one of these peers."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, no peer, or closed by now
            copy = os.dup(int(file.name))  # the number may soon be another file's
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with connection:
                peer: Any = connection.getpeername()
                if isinstance(peer, tuple) and _plain(peer) in addresses:
                    connection.shutdown(socket.SHUT_RDWR)


def _plain(peer: tuple[Any, ...]) -> tuple[str, int]:
    return str(peer[0]).removeprefix("::ffff:"), int(peer[1])
