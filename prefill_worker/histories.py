"""The reads of prompts' pages that decode workers keep, a hand-over in reverse.

A turn's session lies on its decode worker, and the last answer of every conversation in the prefix
index there. The decode worker lends it with the grant, and keeps it untouched while the stream
lives.

Here the request has memory for its whole prompt before anything is read. It is computed once the
decode worker has confirmed the pages. Until then nothing of it is announced, published or sampled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.commands import Dropped, Mailbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.metrics import HISTORY_READS, PAGE_MISMATCHES, VERIFIED_PAGES
from kvrelay.kv_transfer.checksums import locate
from kvrelay.kv_transfer.errors import PeerRefusedError, ProtocolError
from kvrelay.kv_transfer.hand_over.states import PrefillState
from kvrelay.kv_transfer.pull import TIMEOUTS_A_READ, PullState
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.kv_transfer.verify_pages import VerifyPages, choose
from kvrelay.prefill_worker.request import (
    HandOverStream,
    HistoryHashed,
    HistoryLoad,
    HistoryRead,
    PrefillRequest,
)
from kvrelay.prefill_worker.sending import send
from kvrelay.wire.hand_over import Grant, History, PagePlace, PageSum, Released
from kvrelay.wire.output import FailureReason

logger = logging.getLogger(__name__)

_FADES = 0.95
"""The factor on the expected overhead of reads after each read that it has prevented."""
_REMEMBERED = 8
"""The last reads of which the least overhead is expected."""
_AVOIDED_SECONDS = 60.0
"""The time after a failed read in which nothing more is read from that decode worker. Each failed
read costs a request an attempt, and keeps its pages in quarantine."""


class Histories:
    """The choice of the histories that are read, and their reads.

    Args:
        context: the worker's memory, requests and outputs.
        agent: reads and hashes.
        inbox: where reads and hashes report their end.
        verify_pages: the pages to compare.
        timeout: seconds that a peer may be silent.
        on_valid: called with a request whose history is here, to compute the rest.
        fail: ends a request for a cause that another attempt may not meet.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        agent: Transfers,
        inbox: Mailbox[HistoryRead | HistoryHashed],
        verify_pages: VerifyPages,
        timeout: float,
        on_valid: Callable[[PrefillRequest], None],
        fail: Callable[[PrefillRequest, FailureReason, str], None],
    ) -> None:
        self._context = context
        self._agent = agent
        self._inbox = inbox
        self._verify_pages = verify_pages
        self._slowest = TIMEOUTS_A_READ * timeout
        self._on_valid = on_valid
        self._fail = fail
        self._overhead_seconds = 0.0
        self._overheads: deque[float] = deque(maxlen=_REMEMBERED)
        self._met: set[str] = set()
        """The decode workers that were read from: the first read also connects."""
        self._avoided_until: dict[str, float] = {}
        """The decode workers whose last read has failed, and until when nothing is read there."""

    def take(self, request: PrefillRequest, grant: Grant) -> None:
        """Note the history that a grant lends; `ProtocolError` if it is no part of the prompt."""
        history, shape = grant.history, self._context.kv_cache.shape
        if history is None:
            return
        whole = request.input_len // shape.page_size
        ends = {run.end for run in history.runs}
        starts = any(run.first_page for run in history.runs)
        if len(history.runs) != len(shape.pools) or any(shape.windowed):
            raise ProtocolError(f"{len(history.runs)} pools lent of {len(shape.pools)}")
        if starts or len(ends) != 1 or not ends <= set(range(1, whole + 1)):
            raise ProtocolError(f"pages up to {sorted(ends)} lent of {whole}")
        request.history = history

    def begin(self, request: PrefillRequest) -> bool:
        """Read the decode worker's pages that are missing here, if that is faster than computing.

        Args:
            request: has memory promised for its whole input, and nothing of it announced.

        Returns:
            Whether they are read: `on_valid` is called later. If not, nothing has changed.
        """
        history, held, stream = request.history, request.held, request.stream
        if history is None or stream is None or self._avoids(stream.decode_incarnation):
            return False
        page_size = held.page_size
        first = held.kv_committed_len // page_size
        end = min(history.runs[0].end, request.reusable_len // page_size)
        seconds = self._seconds_to_read(history, end - first)
        if end <= first or seconds >= self._seconds_to_compute(first, end):
            if end > first:
                self._overhead_seconds *= _FADES
            self._context.metrics.count(HISTORY_READS, outcome="not_needed")
            return False
        if not self._meet(stream.decode_incarnation, history):
            return False
        request.hand_over.load()
        grown = self._context.kv_cache.grow(held, end * page_size)
        assert grown, "a promise was broken"
        pull = self._agent.pull(
            stream.decode_incarnation,
            [held.pages(pool)[first:end].astype(np.int64) for pool in range(len(history.runs))],
            [np.asarray(run.page_ids[first:end], np.int64) for run in history.runs],
            lambda pull: self._inbox.post(HistoryRead(stream, pull)),
        )
        request.load = HistoryLoad(pull, first, end, time.monotonic())
        request.enter(Phase.BORROWING)
        return True

    def read(self, message: HistoryRead, request: PrefillRequest | None) -> None:
        """Take the end of a read, well or not; `request` is None if it has ended."""
        pull = message.pull
        self._context.metrics.count_pull(pull)
        if pull.state is PullState.FAILED:
            self._agent.reconnect(pull.peer)
        if request is None:
            return
        load = request.load
        assert load is not None
        if load.is_read:  # its end was told before
            self._context.metrics.count_dropped(Dropped.DUPLICATE)
            return
        if pull.state is not PullState.DONE:
            error = f"read from {pull.peer} failed: {pull.error}"
            self._fail_load(request, FailureReason.READ_FAILED, error)
            return
        load.is_read, request.progressed_at = True, time.monotonic()
        self._compare_or_say_done(request, message.stream)

    def hashed(self, message: HistoryHashed, request: PrefillRequest | None) -> None:
        """Send the sums of the pages that were read with its Done."""
        if request is not None:
            self._send_done(request, message.sums)

    def released(self, request: PrefillRequest, message: Released) -> None:
        """Use the pages that were read, or fail the request, by the decode worker's verdict.

        Raises `ProtocolError` if the decode worker was not asked.
        """
        valid, load = request.hand_over.on_load_released(message), request.load
        assert load is not None
        if not valid:
            self._context.metrics.count(PAGE_MISMATCHES, message.mismatches)
            error = f"{message.mismatches} pages of the history are not as they are on their worker"
            self._fail_load(request, FailureReason.PAGE_MISMATCH, error)
            return
        self._learn(load)
        self._context.metrics.count(HISTORY_READS, outcome="valid")
        self._context.kv_cache.commit(request.held, load.end_page * request.held.page_size)
        self._on_valid(request)

    def _learn(self, load: HistoryLoad) -> None:
        """Learn the time that messages took beside the read.

        The estimate fades while it prevents reads, and the next read corrects it. A peer's first
        read does not count, because it connects the two.
        """
        if load.pull.peer in self._met:
            took = time.monotonic() - load.begun - load.pull.seconds
            self._overheads.append(max(took, 0.0))
            self._overhead_seconds = min(self._overheads)
        self._met.add(load.pull.peer)

    def forget(self, incarnation: str) -> None:
        """Forget a decode worker that is dead."""
        self._met.discard(incarnation)
        self._avoided_until.pop(incarnation, None)

    def fail_stuck(self) -> None:
        """End the requests whose reads do not end."""
        now = time.monotonic()
        for request in list(self._context.requests.values()):
            load = request.load
            if load is None or request.hand_over.state is not PrefillState.LOADING:
                continue
            if now - load.begun > self._slowest:
                error = f"a read has not ended for {self._slowest:g} s"
                self._fail_load(request, FailureReason.READ_FAILED, error)

    def _avoids(self, incarnation: str) -> bool:
        """Whether a read from a decode worker has failed a short while ago."""
        return time.monotonic() < self._avoided_until.get(incarnation, 0.0)

    def _seconds_to_read(self, history: History, pages: int) -> float:
        """Estimate the seconds of a read, with the least overhead of the last ones."""
        if not history.bytes_per_second:
            return self._overhead_seconds
        return self._overhead_seconds + pages * self._agent.page_bytes / history.bytes_per_second

    def _seconds_to_compute(self, first: int, end: int) -> float:
        """Estimate the seconds to compute pages of a prompt; infinite if nothing was measured."""
        page_size, speeds = (
            self._context.kv_cache.shape.page_size,
            self._context.speed_learner.speeds,
        )
        if not speeds.prompts_known:
            return float("inf")
        return speeds.prompt_seconds((end - first) * page_size, first * page_size)

    def _meet(self, incarnation: str, history: History) -> bool:
        try:
            self._agent.meet(incarnation, history.agent)
        except PeerRefusedError as error:
            logger.warning("a history is computed, not read: %s", error)
            return False
        return True

    def _compare_or_say_done(self, request: PrefillRequest, stream: HandOverStream) -> None:
        load, held = request.load, request.held
        assert load is not None
        pools = self._context.kv_cache.shape.pool_numbers
        read = [PagePlace(n, page) for n in pools for page in range(load.first_page, load.end_page)]
        places = choose(self._verify_pages, read, request.key.request_id)
        if not places:
            self._send_done(request)
            return
        pages = locate(places, held.tables(), held.page_size, request.input_len)
        self._agent.hash_pages(pages, lambda sums: self._inbox.post(HistoryHashed(stream, sums)))

    def _send_done(self, request: PrefillRequest, sums: tuple[PageSum, ...] = ()) -> None:
        self._context.metrics.count(VERIFIED_PAGES, len(sums))
        send(self._context, request, request.hand_over.loaded(sums))

    def _fail_load(self, request: PrefillRequest, cause: FailureReason, error: str) -> None:
        self._context.metrics.count(HISTORY_READS, outcome="failed")
        if cause is FailureReason.READ_FAILED and request.stream is not None:
            peer = request.stream.decode_incarnation
            self._avoided_until[peer] = time.monotonic() + _AVOIDED_SECONDS
        self._fail(request, cause, error)
