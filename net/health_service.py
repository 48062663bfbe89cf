"""The health checks of gRPC: whether a server serves now, and whenever that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_STATUS = health_pb2.HealthCheckResponse.ServingStatus


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it is untyped
    """The servicer of `grpc.health.v1.Health`.

    To set the status waits for no client: each watcher is told in its own call. A watcher that
    reads slowly misses what was in between.

    Args:
        services: the services, beside the server as a whole; all have one status.
    """

    def __init__(self, services: Iterable[str] = ()) -> None:
        self._services = {"", *services}
        self._status = _STATUS.NOT_SERVING
        self._is_closed = False
        self._watchers: set[asyncio.Event] = set()

    def set(self, *, serving: bool) -> None:
        """Set the status; do nothing after `close`."""
        if not self._is_closed:
            self._status = _STATUS.SERVING if serving else _STATUS.NOT_SERVING
            for watcher in self._watchers:
                watcher.set()

    def close(self) -> None:
        """Serve no more, for good."""
        self.set(serving=False)
        self._is_closed = True

    async def Check(  # noqa: N802 (gRPC's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: it is unknown")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(  # noqa: N802 (gRPC's name)
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Write the status of a service, and again whenever it changes; an unknown one's ends."""
        if request.service not in self._services:
            unknown = health_pb2.HealthCheckResponse(status=_STATUS.SERVICE_UNKNOWN)
            await context.write(unknown)
            return
        changed, told = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                if told is not self._status:
                    told = self._status
                    await context.write(health_pb2.HealthCheckResponse(status=told))
                await changed.wait()
        finally:
            self._watchers.discard(changed)
