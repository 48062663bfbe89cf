"""The gRPC service for other routers: which workers there are, from where this one has it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvrelay.router.discovery import Discovery
from kvrelay.v1 import controller_pb2_grpc
from kvrelay.wire.messages import WORKER_LIST
from kvrelay.wire.worker_list import WorkerList


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """Serves `kvrelay.v1.ControllerService`.

    Args:
        discovery: lists the workers.
    """

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    async def WatchWorkers(  # noqa: N802
        self, _request: Any, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the list, whenever it has changed; a slow reader misses what lies between."""
        while True:
            changed = asyncio.create_task(self._discovery.changed())
            await asyncio.sleep(0)  # it is registered now
            try:
                discovery = self._discovery
                now = WorkerList(tuple(discovery.endpoints()), tuple(discovery.awaited()))
                await context.write(WORKER_LIST.to_message(now))
                await changed
            finally:
                changed.cancel()
