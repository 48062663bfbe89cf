"""uvicorn's HTTP protocol on a listener of the router's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvrelay.net.tls import TlsFiles

_WAITING: Final = 1024
"""To be accepted."""


class _Connection(HttpToolsProtocol):
    """Lets a call drop its connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"kvrelay.abort": {"call": self.transport.abort}}


class Listener:
    """Serves an application.

    Args:
        app: serves each call.
        host: the address to listen on.
        port: 0: any free one.
        files: for TLS; None: plain text.

    Raises:
        OSError: the port is in use, or a file cannot be read.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, files: TlsFiles | None) -> None:
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        """The real one."""
        self._tls = None if files is None else _context(files)
        self._state = ServerState()
        self._config = Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
        )
        self._config.load()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Takes connections from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, sock=self._socket, ssl=self._tls, backlog=_WAITING
        )

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more connections, lets calls end for so long, then drops what is open."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=grace_seconds)
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._server.wait_closed()

    def _connection(self) -> asyncio.Protocol:
        state: dict[str, Any] = {}
        return _Connection(self._config, self._state, state)


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


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    return context
