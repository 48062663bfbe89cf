"""The sending of the prefill side's messages on a request's hand-over stream."""

from __future__ import annotations

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.prefill_worker.request import PrefillRequest
from kvrelay.wire.hand_over import Announce, FromPrefill


def send(
    context: SchedulerContext[PrefillRequest], request: PrefillRequest, message: FromPrefill | None
) -> None:
    """Send a message at the end of this pass; nothing if it is None or no stream is open."""
    stream = request.stream
    if message is None or stream is None:
        return
    if isinstance(message, Announce):
        request.enter(Phase.ANNOUNCED)
    context.outbox.put(stream, stream.sequencer.number(message))
