"""uvicorn's HTTP protocol on a listener of the router's own event loop, with bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvrelay.net.door_rules import HTTP
from kvrelay.net.tls import TlsFiles, server_context
from kvrelay.router.doors.http.bodies import CLOSE
from kvrelay.router.doors.http.http_parser import PlainHttpParser

_log = logging.getLogger(__name__)
MOST_CONNECTIONS: Final = HTTP.most_connections or 0
"""The most connections of a listener.

One more ends the oldest handshake or the oldest idle connection, from the larger group.
"""
HEAD_SECONDS: Final = HTTP.begin_seconds
"""The time in which a request's head must arrive, and a TLS handshake must end."""
_MOST_HEAD_BYTES: Final = HTTP.most_head_bytes
_MOST_TRAILER_BYTES: Final = 8 << 10
_MOST_PIPELINED: Final = 8
"""The most calls that a client may send before the previous one is answered."""
_FRAMING: Final = 4
"""The bytes on the wire that a body may have for each of its own, as chunks have sizes."""
_WAITING: Final = 1024
"""The most connections that wait to be accepted."""
_PAUSE_SECONDS: Final = 0.5
"""The pause before the next attempt to accept, when the process has no file left."""


@dataclass(frozen=True)
class ConnectionBounds:
    """The bounds of a listener's connections."""

    most_body_bytes: int
    """The most bytes of a body that is read at all."""
    flush_seconds: float
    """The time in which a client must take a part of the answer that waits for it."""
    idle_seconds: float
    """The time that a connection may idle between two calls."""
    idle: dict[_Connection, None] = field(default_factory=dict)
    """The connections without a call, the longest idle first."""


class _Connection(HttpToolsProtocol):
    """A connection that is ended if it is too slow or too large; a call can drop it.

    Args:
        config: uvicorn's configuration.
        state: uvicorn's state of the listener.
        bounds: the bounds of all connections of the listener.
    """

    def __init__(self, config: Config, state: ServerState, bounds: ConnectionBounds) -> None:
        super().__init__(config, state, {})
        self.parser = PlainHttpParser(self)  # type: ignore[assignment]
        self.timeout_keep_alive = bounds.idle_seconds  # type: ignore[assignment]
        self._bounds = bounds
        self._head_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._in_head = True
        self._message_bytes = 0  # since its first one
        self._trailer_bytes = 0
        self._idles_until = 0.0  # on the loop's clock
        self._served: RequestResponseCycle | None = None  # uvicorn's `cycle` is the newest call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._bounds.idle[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.idle.pop(self, None)
        for timer in (self._head_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._message_bytes += len(data)
        most = _MOST_HEAD_BYTES
        if not self._in_head:
            most += _FRAMING * self._bounds.most_body_bytes
        if self._message_bytes > most + len(data):
            self.transport.abort()
        elif not self.transport.is_closing():
            super().data_received(data)
            self._go_on_idling()

    def _go_on_idling(self) -> None:
        """Set the timer again if what came has begun no call, as empty lines do not."""
        if self in self._bounds.idle and self._head_timer is None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_at(
                self._idles_until, self.timeout_keep_alive_handler
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._message_bytes, self._trailer_bytes = True, 0, 0
        self.scope["extensions"] = {"kvrelay.abort": {"call": self.transport.abort}}
        if self._head_timer is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value)  # nobody reads them
        if self._trailer_bytes > _MOST_TRAILER_BYTES:
            self.transport.abort()
            raise ValueError("too many trailers")  # else the parser goes on with what has come

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many calls at once")
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._bounds.idle.pop(self, None)
        _set_date(self.server_state)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _UntilClosed(cycle, app)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._served is not None and self._served.more_body:  # nobody reads the rest
            self.transport.close()
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._bounds.idle[self] = None
            self._idles_until = self.loop.time() + self.timeout_keep_alive
        if self._flush_timer is None:
            self._await_flush()

    def timeout_keep_alive_handler(self) -> None:
        if self._flush_timer is None:
            super().timeout_keep_alive_handler()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _await_flush(self) -> None:
        """Check, as long as bytes of an answer are unsent, that the client takes some."""
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._flush_timer = None
        if self._unsent_bytes:
            self._flush_timer = self.loop.call_later(self._bounds.flush_seconds, self._look)
        elif not self.transport.is_closing():  # the timer may have passed meanwhile
            self._go_on_idling()

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unsent_bytes:
            self.transport.abort()
        else:
            self._await_flush()


def _set_date(state: ServerState) -> None:
    """Let the headers of all answers, from now on, have the time of this second."""
    date = (b"date", formatdate(int(time.time()), usegmt=True).encode())
    state.default_headers[:1] = [date]


class _UntilClosed:
    """An application for clients that know no chunks: its answer ends with the connection.

    Args:
        cycle: uvicorn's cycle of the call.
        app: the application that answers the call.
    """

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle = cycle
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    self._cycle.chunked_encoding = False
            elif not has_length:  # uvicorn counts what is left of a body without chunks
                self._cycle.expected_content_length = len(message["body"])
            await send(message)

        await self._app(scope, receive, send_plain)  # type: ignore[arg-type]


class HttpListener:
    """A listener that serves an application.

    Args:
        app: the application that serves each call.
        host: the address to listen on.
        port: the port; 0: any free one.
        files: the files for TLS; None: plain text.
        bounds: the bounds of its connections.

    Raises:
        OSError: the port is in use, or a file cannot be read.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, files: TlsFiles | None, bounds: ConnectionBounds
    ) -> None:
        self._tls = None if files is None else server_context(files)
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        """The real port."""
        self._bounds = bounds
        self._state = ServerState()
        _set_date(self._state)
        self._config = Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,  # uvicorn sets it in a loop of its own, which does not run here
            ws="none",
        )
        self._config.load()
        self._accepting: asyncio.Task[None] | None = None
        self._beginning: dict[asyncio.Task[None], None] = {}
        """The connections in their handshake, the oldest first."""

    @property
    def num_connections(self) -> int:
        """The number of open connections, with those in their handshake."""
        return len(self._state.connections) + len(self._beginning)

    async def start(self) -> None:
        """Begin to accept connections."""
        self._socket.listen(_WAITING)
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if self.num_connections < MOST_CONNECTIONS or self._make_room():
                beginning = asyncio.create_task(self._begin(accepted))
                self._beginning[beginning] = None
                beginning.add_done_callback(self._begun)
            else:
                accepted.close()
            await asyncio.sleep(0)  # calls come between two of many that are waiting

    def _make_room(self) -> bool:
        """End one connection without a call; return whether there was one."""
        # Handshakes that many begin at once must not end each other while others idle.
        if self._tls is not None and len(self._beginning) > len(self._bounds.idle):
            oldest = next(iter(self._beginning))
            del self._beginning[oldest]
            oldest.cancel()
            return True
        idle = next(iter(self._bounds.idle), None)
        if idle is None:
            return False
        del self._bounds.idle[idle]
        idle.transport.abort()
        return True

    async def _begin(self, accepted: socket.socket) -> None:
        """Make a connection of a socket, after its handshake if there is TLS."""
        seconds = None if self._tls is None else HEAD_SECONDS
        with contextlib.suppress(OSError):  # it has failed, or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self._config, self._state, self._bounds),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )

    def _begun(self, beginning: asyncio.Task[None]) -> None:
        self._beginning.pop(beginning, None)

    def close_after_answers(self) -> None:
        """Let each answer that begins from now on close its connection, so that clients move."""
        self._state.default_headers[1:] = [CLOSE]

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let calls end for `grace_seconds`, then drop all connections."""
        if self._accepting is not None:
            await _cancelled([self._accepting])
        self._socket.close()
        await asyncio.sleep(0)  # each has begun, and so ends its socket
        await _cancelled(list(self._beginning))
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=grace_seconds)
        await _cancelled(list(self._state.tasks))
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # until they are closed


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _listening(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
