"""An HTTP server for a process's metrics, which many silent connections cannot block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, make_wsgi_app

_WAITING: Final = 1024
"""Connections that wait to be accepted. One more is dropped, and its client retries in a second."""
_PAUSE_SECONDS: Final = 0.1


class Bounds(Protocol):
    """The bounds of the connections, which have one call each."""

    @property
    def most_connections(self) -> int | None:
        """The most connections. One more ends the oldest, so that silent ones block nobody."""

    @property
    def idle_seconds(self) -> float | None:
        """Time for a connection to send its request and to take the answer."""

    @property
    def most_head_bytes(self) -> int:
        """The most bytes of a request."""


class MetricsServer:
    """An HTTP server on one thread of its own; it serves from its construction to `close`.

    Args:
        registry: read at every scrape, on that thread.
        host: the address to listen on.
        port: the port; 0: any free one.
        bounds: the bounds of its connections.
        pages: functions by path, each of which makes a page of JSON, on that thread. Its argument
            is the client's Host header.

    Raises:
        OSError: the port is in use.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        bounds: Bounds,
        pages: Mapping[str, Callable[[str], bytes]] = MappingProxyType({}),
    ) -> None:
        self._pages = pages
        self._bounds = bounds
        self._app: Any = make_wsgi_app(registry)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(_WAITING)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        """The port that it listens on, also if 0 was asked for."""
        self._listener.setblocking(False)
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and the thread; call it once."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop), self._listener:
            self._loop.run_until_complete(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        self._listen()
        await self._closing.wait()
        self._loop.remove_reader(self._listener)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Take one connection per round of the loop, so that open ones are served in between."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the process has no files left, or the client has left already
            self._loop.remove_reader(self._listener)
            if not self._closing.is_set():
                self._loop.call_later(_PAUSE_SECONDS, self._listen)
        else:
            connection.setblocking(False)
            self._keep(connection)

    def _keep(self, connection: socket.socket) -> None:
        most = self._bounds.most_connections
        if most is not None and len(self._connections) >= most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(connection))
        self._connections[task] = None

        def ended(_: asyncio.Task[None]) -> None:
            self._connections.pop(task, None)
            connection.close()

        task.add_done_callback(ended)

    async def _serve(self, connection: socket.socket) -> None:
        """Take one request and answer it. Errors of the connection or the request are ignored."""
        with contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            async with asyncio.timeout(self._bounds.idle_seconds):
                reader, writer = await asyncio.open_connection(
                    sock=connection, limit=self._bounds.most_head_bytes
                )
                try:
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    writer.close()
                    await writer.wait_closed()
                finally:
                    writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        """The whole answer to a request's head; raises ValueError if the head is malformed."""
        request, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = request.split(" ")
        parts = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in parts}
        path, _, query = target.partition("?")
        if path in self._pages and method == "GET":
            page = self._pages[path](headers.get("host", ""))
            return _response("200 OK", [("Content-Type", "application/json")], page)
        began: list[tuple[str, list[tuple[str, str]]]] = []
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": headers.get("accept-encoding", ""),
        }
        body = b"".join(self._app(environ, lambda *status: began.append(status)))
        return _response(*began[0], body)


def _response(status: str, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    sent = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    text = "".join(f"{name}: {value}\r\n" for name, value in sent)
    return f"HTTP/1.1 {status}\r\n{text}\r\n".encode("latin-1") + body
