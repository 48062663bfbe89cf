"""The hand-overs on the decode side: what prefill workers send, and when a request is activated."""

from __future__ import annotations

import time
from typing import assert_never

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.hand_over_stream import CloseStream, PeerMessage, StreamLost
from kvrelay.decode_worker.lent_histories import LentHistories
from kvrelay.decode_worker.pulls import Pulls
from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.choices import fork_and_run
from kvrelay.engine.scheduler.commands import Dropped
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.metrics import PAGE_MISMATCHES, VERIFIED_PAGES
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.hand_over import (
    Announce,
    Ask,
    Begun,
    Done,
    Ended,
    FromPrefill,
    HandOverEnd,
    Heartbeat,
    Released,
)
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd


class HandOvers:
    """The handling of the prefill workers' messages.

    Args:
        context: the worker's memory, requests and outputs.
        requests: finds requests by their streams, and ends them.
        pulls: reads announced pages.
        growth: learns if choices do not fit together.
        histories: confirms the pages that were lent.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        pulls: Pulls,
        growth: GrowthReserve,
        histories: LentHistories,
    ) -> None:
        self._context = context
        self._requests = requests
        self._pulls = pulls
        self._growth = growth
        self._histories = histories

    def receive(self, arrived: PeerMessage) -> None:
        """Take a message of a prefill worker, if its request still lives."""
        request, sequenced = self._requests.of_stream(arrived.stream), arrived.sequenced
        if request is None:
            self._context.metrics.count_dropped(Dropped.HAND_OVER)
            return
        try:
            if request.stream.sequencer.accept(sequenced, time.monotonic()):
                self._process(request, sequenced.message)
            else:
                self._context.metrics.count_dropped(Dropped.DUPLICATE)
        except ProtocolError as error:
            self._requests.fail(request, FailureReason.PROTOCOL_ERROR, str(error))

    def _process(self, request: HandedOverRequest, message: FromPrefill) -> None:
        match message:
            case Ask():
                request.hand_over.on_ask(message)
                request.enter(Phase.ASKED)
            case Done():
                self._histories.answer(request, message)
            case Begun():
                request.hand_over.on_begun()
            case Announce():
                self._pulls.read(request, message)
            case Released():
                self._activate(request, message)
            case Ended():
                self._prefill_ended(request, message)
            case Heartbeat():
                pass  # the sequencer has noted when it came
            case _:
                assert_never(message)

    def stream_lost(self, message: StreamLost) -> None:
        """Fail the stream's request, unless its pages are known to be right already."""
        request = self._requests.of_stream(message.stream)
        if request is not None and request.hand_over.state is not DecodeState.VALID:
            peer = message.stream.peer.incarnation
            error = f"hand-over from {peer}: {message.detail}"
            self._requests.fail(request, message.cause, error)

    def _activate(self, request: HandedOverRequest, message: Released) -> None:
        """Activate a request whose pages the prefill side has confirmed, so that it generates."""
        valid = request.hand_over.on_released(message)
        self._context.metrics.count(VERIFIED_PAGES, request.hand_over.num_compared)
        if not valid:
            self._context.metrics.count(PAGE_MISMATCHES, message.mismatches)
            error = f"{message.mismatches} pages are not as they were computed"
            self._requests.fail(request, FailureReason.PAGE_MISMATCH, error)
            return
        request.activate_taken_over()
        self._context.outbox.put(request.stream, CloseStream())
        self._context.kv_cache.commit(request.held, request.input_len)
        if not request.borrowed_len:  # what is published cannot be rolled back
            # All of it is written, and nothing reads its pages yet.
            self._context.kv_cache.sharing.publish(request.held, request.input_ids)
        live = []
        for choice, first in zip(request.choices, request.hand_over.first_tokens, strict=True):
            if first.finished:
                self._context.emit(request, end=RequestEnd(EndReason.ABORTED), choice=choice)
            else:
                live.append((choice, first.token_id))
        fork_and_run(self._context, self._requests.running, self._growth, request, live)

    def _prefill_ended(self, request: DecodeRequest, message: Ended) -> None:
        if message.reason is HandOverEnd.FAILED:
            error = f"the prefill side failed: {message.detail}"
            self._requests.fail(request, FailureReason.PEER_FAILED, error)
        else:
            self._requests.end_early(request, Outcome.ABORTED, RequestEnd(EndReason.ABORTED))
