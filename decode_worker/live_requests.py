"""The live requests of a decode worker: sending to their prefill workers, and ending them."""

from __future__ import annotations

from kvrelay.decode_worker.hand_over_stream import CloseStream, HandOverStream
from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.engine.faults import Phase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.running_batch import RunningBatch
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.hand_over import FromDecode
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd


class LiveRequests:
    """Finds requests by their streams, and releases those that end before they finish.

    Args:
        context: the worker's memory, requests and outputs.
        growth: learns how long outputs are.
        retract_every: if not 0, a running request is retracted every so many steps, for tests.
    """

    def __init__(
        self, context: SchedulerContext[DecodeRequest], growth: GrowthReserve, retract_every: int
    ) -> None:
        self._context = context
        self.running: RunningBatch[DecodeRequest] = RunningBatch(
            context, growth, self._release_retracted, retract_every=retract_every
        )
        """Those that generate."""

    def of_stream(self, stream: HandOverStream) -> DecodeRequest | None:
        """The live request that the stream belongs to."""
        request = self._context.requests.get(stream.key)
        return request if request is not None and request.stream is stream else None

    def send(self, request: DecodeRequest, message: FromDecode) -> None:
        """Send a message to the request's prefill worker, at the end of this pass."""
        self._context.outbox.put(request.stream, request.stream.sequencer.number(message))

    def fail(self, request: DecodeRequest, cause: FailureReason, error: str) -> None:
        """End a request for a cause that another attempt may not meet."""
        end = RequestEnd(EndReason.FAILED, error=error, cause=cause)
        self.end_early(request, Outcome.ABORTED, end)

    def end_early(self, request: DecodeRequest, outcome: Outcome, end: RequestEnd) -> None:
        """Release a request, whatever phase it is in; reads that still run fence its pages."""
        self.running.remove(request)
        unreadable = end.cause is FailureReason.READ_FAILED
        self._context.outbox.put(request.stream, CloseStream(unreadable=unreadable))
        self._context.release(
            request, outcome, end, timings=request.timings(), fences=request.pulls
        )

    def _release_retracted(self, request: DecodeRequest) -> None:
        """Release a request that makes room; its router submits it again, perhaps elsewhere."""
        end = RequestEnd(EndReason.RETRACTED)
        self._context.release(request, Outcome.RETRACTED, end, timings=request.timings())
        self._context.faults.reach(Phase.RETRACTED, request.stream.peer.incarnation)
