"""The gRPC service for operators: the router passes their calls on to whoever runs the workers."""

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

_POLL_SECONDS = 0.5
"""Between two looks at how many requests a draining worker still has."""


class DrainPhase(StrEnum):
    """How far a drain has come."""

    DRAINING = "draining"
    """The worker takes no more requests."""
    LEFT = "left"
    """Its process has ended."""
    READY = "ready"
    """Its successor takes requests."""


@dataclass(frozen=True, slots=True)
class DrainStep:
    """A drain has reached a phase."""

    phase: DrainPhase
    incarnation: str
    """Of the worker that leaves; in `READY`, of its successor."""


class Administrator(Protocol):
    """Runs the workers. `deploy` hands the router one."""

    def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        """Drains a worker and yields each phase. The drain goes on if nobody iterates any more.

        Args:
            worker: its name.
            remove: start no successor; the last phase is `LEFT` then.

        Raises:
            UnknownWorker: no worker has this name.
            CannotDrain: the worker cannot be drained now, or never.
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
        """Streams a drain's phases, and how many requests the worker still has while it drains."""
        steps = aiter(self._administrator.drain(message.worker, remove=message.remove))
        step = await anext(steps, None)
        while step is not None:
            coming = asyncio.ensure_future(anext(steps, None))
            try:
                await self._write(step, coming, context)
                step = await coming
            finally:
                coming.cancel()

    async def _write(
        self,
        step: DrainStep,
        coming: asyncio.Future[DrainStep | None],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Writes a step, and again whenever the worker's requests change, until the next step."""
        written = None
        while written is None or not coming.done():
            now = pb.DrainWorkerResponse(phase=_PHASES[step.phase], incarnation=step.incarnation)
            if step.phase is DrainPhase.DRAINING:
                now.requests = self._requests(step.incarnation)
            if now != written:
                await context.write(now)
            written = now
            await asyncio.wait({coming}, timeout=_POLL_SECONDS)

    def _requests(self, incarnation: str) -> int:
        """Requests that the worker reports."""
        for link in self._fleet.links:
            if link.endpoint.incarnation == incarnation:
                return link.load.waiting_requests + link.load.running_requests
        return 0
