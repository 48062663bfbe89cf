"""The operators' gRPC service: what the router passes on to whoever runs the workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc

from kvrelay.router.fleet import Fleet
from kvrelay.router.status import with_status
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import admin_pb2_grpc

_LOOK_SECONDS = 0.5
"""Between two looks at how many requests a worker still has."""


class DrainPhase(StrEnum):
    """How far a drain is."""

    DRAINING = "draining"
    """The worker takes no more requests."""
    LEFT = "left"
    """Its process has ended."""
    READY = "ready"
    """Another one has taken its place."""


@dataclass(frozen=True, slots=True)
class DrainStep:
    """A drain has come this far."""

    phase: DrainPhase
    incarnation: str
    """The worker's that leaves; its successor's, when that is ready."""


class Administrator(Protocol):
    """Runs the workers. `deploy` hands the router one."""

    def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drain a worker, and tell of each phase. It goes on if nobody listens any more.

        Args:
            worker: its name.
            remove: nobody takes its place; the last phase is `LEFT` then.

        Raises:
            UnknownWorker: none has this name.
            CannotDrain: not now, or not at all.
        """
        ...


_PHASES = {
    DrainPhase.DRAINING: pb.DrainWorkerResponse.PHASE_DRAINING,
    DrainPhase.LEFT: pb.DrainWorkerResponse.PHASE_LEFT,
    DrainPhase.READY: pb.DrainWorkerResponse.PHASE_READY,
}


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Serves `kvrelay.v1.AdminService`."""

    def __init__(self, administrator: Administrator, fleet: Fleet) -> None:
        self._administrator = administrator
        self._fleet = fleet

    @with_status
    async def DrainWorker(  # noqa: N802
        self, message: pb.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams a drain's phases; while it lasts also how many requests are left."""
        steps = aiter(self._administrator.drain(message.worker, remove=message.remove))
        step = await anext(steps, None)
        while step is not None:
            coming = asyncio.ensure_future(anext(steps, None))
            try:
                await self._tell(step, coming, context)
                step = await coming
            finally:
                coming.cancel()

    async def _tell(
        self,
        step: DrainStep,
        coming: asyncio.Future[DrainStep | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Tell of a step, and again when its requests have changed, until the next is coming."""
        told = None
        while told is None or not coming.done():
            now = pb.DrainWorkerResponse(phase=_PHASES[step.phase], incarnation=step.incarnation)
            if step.phase is DrainPhase.DRAINING:
                now.requests = self._requests(step.incarnation)
            if now != told:
                await context.write(now)
            told = now
            await asyncio.wait({coming}, timeout=_LOOK_SECONDS)

    def _requests(self, incarnation: str) -> int:
        """That the worker says it has."""
        for link in self._fleet.links:
            if link.endpoint.incarnation == incarnation:
                return link.load.waiting_requests + link.load.running_requests
        return 0
