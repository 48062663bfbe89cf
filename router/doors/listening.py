"""The start of the router's gRPC listeners, and their end with everything else."""

from __future__ import annotations

import contextlib

import grpc

from kvrelay.net.channels import bind
from kvrelay.net.tls import TlsFiles
from kvrelay.router.errors import StartError

STOP_GRACE_SECONDS = 2.0
"""Seconds for the last statuses to reach their clients."""


async def listen(
    undo: contextlib.AsyncExitStack,
    server: grpc.aio.Server,
    address: str,
    files: TlsFiles | None,
    what: str,
) -> str:
    """Start the server, which `undo` stops; return its address with the real port."""
    host, _ = host_and_port(address)
    try:
        port = bind(server, address, files)
    except OSError as error:
        raise StartError(f"{what}: {error}") from error
    await server.start()
    undo.push_async_callback(server.stop, STOP_GRACE_SECONDS)
    return f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port``. Raises StartError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise StartError(f"{address!r} is not an address: must be host:port")
    return host, int(port)
