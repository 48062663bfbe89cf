"""The live requests of a decode worker: their steps, their prefill workers, and their end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvrelay.decode_worker.hand_over_stream import CloseStream, HandOverStream
from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.itl_target import ItlTarget
from kvrelay.engine.scheduler.mixed_steps import MixedSteps, Newcomers
from kvrelay.engine.scheduler.running_batch import RunningBatch
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.hand_over import FromDecode
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd


class HandedOver(Newcomers):
    """The requests that prefill workers hand over.

    Args:
        context: has the live requests.
    """

    def __init__(self, context: SchedulerContext[DecodeRequest]) -> None:
        self._context = context

    @property
    def are_coming(self) -> bool:
        """Whether a prefill worker computes one, or the last pages of one are being read."""
        return self.join_next or any(request.is_being_computed for request in self._requests())

    @property
    def join_next(self) -> bool:
        """Whether the last pages of one are being read."""
        now = time.monotonic()
        return any(request.generates_soon(now) for request in self._requests())

    def _requests(self) -> Iterator[HandedOverRequest]:
        live = self._context.requests.values()
        return (request for request in live if isinstance(request, HandedOverRequest))


class DecodeRequests:
    """The live requests: found by their streams, and released if they end before they finish.

    Args:
        context: the worker's memory, requests and outputs.
        growth: learns how long outputs are.
        config: bounds of a step, tests' forced retractions.
    """

    def __init__(
        self, context: SchedulerContext[DecodeRequest], growth: GrowthReserve, config: WorkerConfig
    ) -> None:
        self._context = context
        self.running: RunningBatch[DecodeRequest] = RunningBatch(
            context, growth, self._release_retracted, retract_every=config.debug_retract_every
        )
        """The requests that generate."""
        self.steps: MixedSteps[DecodeRequest] = MixedSteps(
            context,
            self.running,
            growth,
            ItlTarget(config.latency_targets, context.speed_learner, own_prompts=False),
            config.chunk_tokens,
            HandedOver(context),
        )
        """The steps of the running requests and of the prompts that are computed here."""

    def of_stream(self, stream: HandOverStream) -> HandedOverRequest | None:
        """Find the live request that the stream belongs to."""
        request = self._context.requests.get(stream.key)
        if isinstance(request, HandedOverRequest) and request.stream is stream:
            return request
        return None

    def send(self, request: HandedOverRequest, message: FromDecode) -> None:
        """Send a message to the request's prefill worker, at the end of this pass."""
        self._context.outbox.put(request.stream, request.stream.sequencer.number(message))

    def fail(self, request: DecodeRequest, cause: FailureReason, error: str) -> None:
        """End a request for a cause that another attempt may not meet."""
        end = RequestEnd(EndReason.FAILED, error=error, cause=cause)
        self.end_early(request, Outcome.ABORTED, end)

    def end_early(self, request: DecodeRequest, outcome: Outcome, end: RequestEnd) -> None:
        """Release a request, whatever phase it is in; reads that still run fence its pages."""
        self.steps.remove(request)
        fences: Sequence[Fence] = ()
        if isinstance(request, HandedOverRequest):
            unreadable = end.cause is FailureReason.READ_FAILED
            self._context.outbox.put(request.stream, CloseStream(unreadable=unreadable))
            fences = request.pulls
            if request.hand_over.lent_differs:  # no turn may go on with its session
                outcome = Outcome.FAILED
        self._context.release(request, outcome, end, timings=request.timings(), fences=fences)

    def _release_retracted(self, request: DecodeRequest) -> None:
        """Release a request that makes room; its router submits it again, perhaps elsewhere."""
        end = RequestEnd(EndReason.RETRACTED)
        self._context.release(request, Outcome.RETRACTED, end, timings=request.timings())
        request.enter(Phase.RETRACTED)
