"""The door for operators: `deploy` hands the router what to serve there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import grpc

from kvrelay.net.tls import TlsFiles


class OperatorDoor(Protocol):
    """Services for operators and other routers, served by whoever supervises the workers."""

    pages: Mapping[str, Callable[[str], bytes]]
    """Pages to serve beside the router's metrics, by path."""

    async def serve(
        self,
        undo: contextlib.AsyncExitStack,
        address: str,
        tls: TlsFiles | None,
        guards: Sequence[grpc.aio.ServerInterceptor],
        requests_of: Callable[[str], int | None],
    ) -> str:
        """Listen until `undo`, and return the address with its real port.

        Args:
            undo: stops it.
            address: ``host:port`` to listen on.
            tls: the certificate to show.
            guards: interceptors that see a call before its message is received.
            requests_of: counts the requests of a worker's incarnation.

        Raises:
            StartError: it cannot listen there.
        """
        ...
