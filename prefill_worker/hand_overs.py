"""The hand-over streams of a prefill worker: opening, messages, and silent peers."""

from __future__ import annotations

import time
from typing import assert_never

from kvrelay.engine.scheduler.commands import Dropped, Mailbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.periodic_check import CHECKS_IN_TIMEOUT, PeriodicCheck
from kvrelay.kv_transfer.checksums import locate
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.kv_transfer.verify_pages import count_mismatches
from kvrelay.mem_cache.release import Outcome
from kvrelay.prefill_worker.histories import Histories
from kvrelay.prefill_worker.prompt_queue import PromptQueue
from kvrelay.prefill_worker.request import (
    HandOverStream,
    HistoryHashed,
    HistoryRead,
    PagesHashed,
    PrefillMessage,
    PrefillRequest,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)
from kvrelay.prefill_worker.sending import send
from kvrelay.wire.hand_over import (
    Done,
    Ended,
    FromDecode,
    Grant,
    HandOverEnd,
    Heartbeat,
    Held,
    Released,
)
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.submit import RequestKey


class HandOvers:
    """The answers to the decode workers.

    A request is released when its stream ends or its pages were read.

    Args:
        context: the worker's memory, requests and outputs.
        queue: releases requests.
        agent: hashes pages that are compared.
        inbox: gets the hashes.
        timeout: seconds after which a silent decode worker is given up.
        histories: reads the pages that decode workers lend.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        queue: PromptQueue,
        agent: Transfers,
        inbox: Mailbox[PagesHashed],
        timeout: float,
        histories: Histories,
    ) -> None:
        self._context = context
        self._queue = queue
        self._agent = agent
        self._inbox = inbox
        self._timeout = timeout
        self._histories = histories
        self.check = PeriodicCheck(timeout / CHECKS_IN_TIMEOUT)
        """The timer of the search for silent decode workers."""
        # Streams whose submission has not arrived yet: either may be first.
        self._early: dict[RequestKey, HandOverStream] = {}

    @property
    def streams(self) -> list[HandOverStream]:
        """All streams that are open."""
        live = [request.stream for request in self._context.requests.values()]
        return [stream for stream in [*live, *self._early.values()] if stream is not None]

    def take_early_stream(self, key: RequestKey) -> HandOverStream | None:
        """Take the stream that was opened before its request came, if there is one."""
        return self._early.pop(key, None)

    def handle(self, message: PrefillMessage) -> None:
        """Take a message of the streams' carrier or of the hasher."""
        match message:
            case StreamOpened():
                self._open(message.stream)
            case StreamMessage():
                self._receive(message)
            case PagesHashed():
                self._compare(message)
            case HistoryRead():
                self._histories.read(message, self._request_of(message.stream))
            case HistoryHashed():
                self._histories.hashed(message, self._request_of(message.stream))
            case StreamClosed():
                self._end_stream(message.stream, HandOverEnd.ABORTED, "the decode worker left")
            case _:
                assert_never(message)

    def end_streams_of(self, decode_incarnation: str) -> None:
        """End all streams of a decode worker that is dead, as the network may not report it."""
        for stream in self.streams:
            if stream.decode_incarnation == decode_incarnation:
                self._end_stream(stream, HandOverEnd.ABORTED, "the decode worker left")

    def end_silent_streams(self) -> None:
        """End the streams that were silent for too long."""
        now = time.monotonic()
        if not self.check.is_due(now):
            return
        self._histories.fail_stuck()
        for stream in self.streams:
            if now - stream.sequencer.heard_at > self._timeout:
                error = f"the decode worker was silent for {self._timeout:g} s"
                self._end_stream(stream, HandOverEnd.FAILED, error)

    def _open(self, stream: HandOverStream) -> None:
        """Assign a stream to its request; a second one for the same request is refused."""
        request = self._context.requests.get(stream.key)
        taken = request.stream if request else self._early.get(stream.key)
        if taken is not None:
            self._context.metrics.count_dropped(Dropped.STREAM)
            refusal = Ended(HandOverEnd.FAILED, "the hand-over is open already")
            self._context.outbox.put(stream, stream.sequencer.number(refusal))
        elif request is None:
            self._early[stream.key] = stream
        else:
            request.stream = stream

    def _receive(self, arrived: StreamMessage) -> None:
        stream, sequenced = arrived.stream, arrived.sequenced
        if self._early.get(stream.key) is stream:
            # Its request was not asked for anything, so this can only be a heartbeat.
            stream.sequencer.heard_at = time.monotonic()
            self._context.outbox.put(stream, stream.sequencer.number(Heartbeat()))
            return
        request = self._request_of(stream)
        if request is None:
            self._context.metrics.count_dropped(Dropped.HAND_OVER)
            return
        try:
            if stream.sequencer.accept(sequenced, time.monotonic()):
                self._answer(request, stream, sequenced.message)
            else:
                self._context.metrics.count_dropped(Dropped.DUPLICATE)
        except ProtocolError as error:
            failed = RequestEnd(
                EndReason.FAILED, error=str(error), cause=FailureReason.PROTOCOL_ERROR
            )
            self._queue.end_early(request, HandOverEnd.FAILED, failed)

    def _answer(self, request: PrefillRequest, stream: HandOverStream, message: FromDecode) -> None:
        match message:
            case Heartbeat():
                send(self._context, request, Heartbeat())
            case Held():
                request.hand_over.on_held()
            case Grant():
                self._queue.take_grant(request, message)
                self._histories.take(request, message)
            case Released():
                self._histories.released(request, message)
            case Done():
                self._all_read(request, stream, message)
            case _:
                assert_never(message)

    def _all_read(self, request: PrefillRequest, stream: HandOverStream, done: Done) -> None:
        """Release the request, or hash its pages first if the decode side has sent sums."""
        released = request.hand_over.on_done(done)
        if released is not None:
            send(self._context, request, released)
            self._queue.release(request, Outcome.HANDED_OVER)
            return
        held = request.held
        try:
            places = [page.place for page in done.sums]
            pages = locate(places, held.tables(), held.page_size, request.input_len)
        except ValueError as error:
            raise ProtocolError(f"sums of what was not announced: {error}") from error
        announced = self._queue.host_reads.as_announced(request, pages)
        self._agent.hash_pages(
            announced, lambda own: self._inbox.post(PagesHashed(stream, own, done.sums))
        )

    def _compare(self, hashed: PagesHashed) -> None:
        """Tell the decode side which pages differ and release the request, if it still lives."""
        request = self._request_of(hashed.stream)
        if request is None:
            return
        mismatches = count_mismatches(hashed.own, hashed.theirs)
        send(self._context, request, request.hand_over.on_verified(mismatches))
        # The pages computed here may be the wrong ones, so no request may find them.
        self._queue.release(request, Outcome.FAILED if mismatches else Outcome.HANDED_OVER)

    def _end_stream(self, stream: HandOverStream, reason: HandOverEnd, error: str) -> None:
        if self._early.get(stream.key) is stream:
            del self._early[stream.key]
        request = self._request_of(stream)
        if request is not None:
            lost = RequestEnd(EndReason.FAILED, error=error, cause=FailureReason.PEER_LOST)
            self._queue.end_early(request, reason, lost)

    def _request_of(self, stream: HandOverStream) -> PrefillRequest | None:
        """The live request that the stream belongs to."""
        request = self._context.requests.get(stream.key)
        return request if request is not None and request.stream is stream else None
