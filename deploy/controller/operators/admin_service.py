"""The gRPC service for operators: the router passes their calls on to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

import grpc

from kvrelay.deploy.controller.changes.steps import (
    DrainPhase,
    DrainStep,
    RollOrder,
    ScalePhase,
    ScaleStep,
)
from kvrelay.router.grpc_status import with_status
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerRole

_POLL_SECONDS = 0.5
"""Seconds between two looks at how many requests a draining worker still has."""


class Administrator(Protocol):
    """The side that runs the workers; `deploy` gives the router one."""

    def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drain a worker and yield each phase. The drain goes on if nobody iterates any more.

        Args:
            worker: its name.
            remove: start no successor; the last phase is `LEFT` then.

        Raises:
            UnknownWorker: no worker has this name.
            CannotDrain: the worker cannot be drained now, or never.
        """
        ...

    def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        """Add and remove workers and yield each phase; it goes on if nobody iterates any more.

        Args:
            wanted: the number of workers; roles that are not named stay as they are.

        Raises:
            CannotScale: the cluster has no room for this number, or is changing already.
        """
        ...

    def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        """Replace all workers and yield each phase; it goes on if nobody iterates any more.

        Raises:
            CannotRoll: the workers cannot have these options, or no roll is possible now.
        """
        ...

    async def shift(self, successor: str) -> None:
        """Let routers send new requests to another cluster's workers.

        Args:
            successor: ``host:port`` of its controller; empty: back to this cluster.

        Raises:
            CannotShift: a router of this cluster cannot do it.
        """
        ...

    async def state(self) -> ClusterState:
        """The controller's state, and all workers that the cluster is to have."""
        ...


_PHASES = {
    DrainPhase.DRAINING: pb.DrainWorkerResponse.PHASE_DRAINING,
    DrainPhase.LEFT: pb.DrainWorkerResponse.PHASE_LEFT,
    DrainPhase.READY: pb.DrainWorkerResponse.PHASE_READY,
}


_SCALE_PHASES = {
    ScalePhase.STARTING: pb.ScaleWorkersResponse.PHASE_STARTING,
    ScalePhase.READY: pb.ScaleWorkersResponse.PHASE_READY,
    ScalePhase.DRAINING: pb.ScaleWorkersResponse.PHASE_DRAINING,
    ScalePhase.LEFT: pb.ScaleWorkersResponse.PHASE_LEFT,
    ScalePhase.FAILED: pb.ScaleWorkersResponse.PHASE_FAILED,
}


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The servicer of `kvrelay.v1.AdminService`.

    Args:
        administrator: carries the calls out.
        requests_of: the number of requests that an incarnation has; None: not known here.
    """

    def __init__(
        self, administrator: Administrator, requests_of: Callable[[str], int | None]
    ) -> None:
        self._administrator = administrator
        self._requests_of = requests_of

    @with_status
    async def DrainWorker(  # noqa: N802
        self, message: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Stream a drain's phases, and how many requests the worker still has while it drains."""
        steps = aiter(self._administrator.drain(message.worker, remove=message.remove))
        step = await anext(steps, None)
        while step is not None:
            coming = asyncio.ensure_future(anext(steps, None))
            try:
                await self._write(step, coming, context)
                step = await coming
            finally:
                coming.cancel()

    @with_status
    async def ScaleWorkers(  # noqa: N802
        self, message: pb.ScaleWorkersRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Stream the phases of each worker that comes or goes."""
        wanted = {role: getattr(message, role) for role in WorkerRole if message.HasField(role)}
        async for step in self._administrator.scale(wanted):
            phase = _SCALE_PHASES[step.phase]
            await context.write(
                pb.ScaleWorkersResponse(worker=step.worker, phase=phase, reason=step.reason)
            )

    @with_status
    async def RollWorkers(  # noqa: N802
        self, message: pb.RollWorkersRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Stream the phases of each worker that is replaced, and of its successor."""
        order = RollOrder(
            options=dict(message.options),
            max_surge=message.max_surge,
            max_unavailable=message.max_unavailable,
            undo=message.undo,
        )
        async for step in self._administrator.roll(order):
            phase = _SCALE_PHASES[step.phase]
            await context.write(
                pb.RollWorkersResponse(worker=step.worker, phase=phase, reason=step.reason)
            )

    @with_status
    async def ShiftRouters(  # noqa: N802
        self, message: pb.ShiftRoutersRequest, _context: grpc.aio.ServicerContext
    ) -> pb.ShiftRoutersResponse:
        """Shift the routers; return when they will be told for sure, also by a later controller."""
        await self._administrator.shift(message.successor)
        return pb.ShiftRoutersResponse()

    async def _write(
        self,
        step: DrainStep,
        coming: asyncio.Future[DrainStep | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Write a step, and again whenever the worker's requests change, until the next step."""
        written = None
        while written is None or not coming.done():
            now = pb.DrainWorkerResponse(phase=_PHASES[step.phase], incarnation=step.incarnation)
            if step.phase is DrainPhase.DRAINING:
                requests = self._requests_of(step.incarnation)
                now.requests, now.requests_unknown = requests or 0, requests is None
            if now != written:
                await context.write(now)
            written = now
            await asyncio.wait({coming}, timeout=_POLL_SECONDS)
