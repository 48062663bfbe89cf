"""The gRPC service that lists the workers for other routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import grpc

from kvrelay.deploy.controller.operators.scrape_targets import EVERYWHERE, ScrapeTargets
from kvrelay.router.discovery import Discovery
from kvrelay.v1 import controller_pb2, controller_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.messages import CLUSTER_STATE, WORKER_LIST
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_list import WorkerList


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """The servicer of `kvrelay.v1.ControllerService`.

    Args:
        discovery: lists the workers.
        targets: learns of the routers that listen.
        state: returns the cluster's state for operators.
    """

    def __init__(
        self,
        discovery: Discovery,
        targets: ScrapeTargets,
        state: Callable[[], Awaitable[ClusterState]],
    ) -> None:
        self._discovery = discovery
        self._targets = targets
        self._state = state
        self._shifted: Counter[str] = Counter()
        """The number of listening routers by the successor that they follow; empty: none."""

    async def GetCluster(  # noqa: N802
        self, _request: Any, _context: grpc.aio.ServicerContext
    ) -> Any:
        """Return the controller's identity and the state of each of its workers."""
        state, successor = await self._state(), self._discovery.successor()
        return CLUSTER_STATE.to_message(
            replace(
                state,
                version=VERSION,
                successor=successor,
                routers=self._shifted.total(),
                routers_shifted=self._num_shifted(successor),
            )
        )

    def _num_shifted(self, successor: str) -> int:
        """Count the routers that follow the successor; if there is none, those that follow any."""
        if successor:
            return self._shifted[successor]
        return self._shifted.total() - self._shifted[""]

    async def WatchWorkers(  # noqa: N802
        self,
        request: controller_pb2.WatchWorkersRequest,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Stream the list whenever it has changed; a slow reader misses the states in between."""
        metrics = _reachable(request.metrics_address, context.peer())
        with self._targets.router(metrics), self._listening(request.shifted_to):
            await self._stream(context)

    @contextmanager
    def _listening(self, shifted_to: str) -> Iterator[None]:
        """Count a router while the context lasts."""
        self._shifted[shifted_to] += 1
        try:
            yield
        finally:
            self._shifted[shifted_to] -= 1
            self._shifted += Counter()  # drops the entries at zero

    async def _stream(self, context: grpc.aio.ServicerContext) -> None:
        while True:
            changed = asyncio.create_task(self._discovery.changed())
            await asyncio.sleep(0)  # `changed` registers before it first suspends
            try:
                discovery = self._discovery
                now = WorkerList(
                    tuple(discovery.endpoints()),
                    tuple(discovery.awaited()),
                    discovery.successor(),
                )
                await context.write(WORKER_LIST.to_message(now))
                await changed
            finally:
                changed.cancel()


def _reachable(address: str, peer: str) -> str:
    """The address of the caller's metrics; a wildcard host becomes the caller's own address.

    Args:
        address: ``host:port`` as the caller listens; empty if it has none.
        peer: gRPC's name of the caller, ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``.
    """
    host, _, port = address.rpartition(":")
    if not port or host not in EVERYWHERE:
        return address
    caller, _, _ = unquote(peer).partition(":")[2].rpartition(":")
    return f"{caller}:{port}"
