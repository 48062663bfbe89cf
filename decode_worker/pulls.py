"""The reads of announced pages from prefill workers, and the hashes of pages to compare."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.hand_over_stream import ConnectAnew, HandOverStream
from kvrelay.decode_worker.readable_hosts import ReadableHosts
from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.attempt_trace import PULL
from kvrelay.engine.scheduler.commands import Dropped, Mailbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.outbox import Sink
from kvrelay.kv_transfer.checksums import locate
from kvrelay.kv_transfer.pull import TIMEOUTS_A_READ, Pull, PullState
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.kv_transfer.verify_pages import VerifyPages, choose
from kvrelay.observe.spans import Attributes
from kvrelay.wire.hand_over import Announce, PageSum
from kvrelay.wire.output import FailureReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullEnded:
    """A message: a read of a request's pages has ended, well or not."""

    stream: HandOverStream
    pull: Pull


@dataclass(frozen=True, slots=True)
class PagesHashed:
    """A message: the pages of a request that are to be compared were hashed."""

    stream: HandOverStream
    sums: tuple[PageSum, ...]


class Pulls:
    """The reads into the pages that a grant has reserved; Done is sent once all is read.

    Args:
        context: the worker's memory, requests and outputs.
        requests: ends a request whose read fails.
        agent: reads and hashes.
        client: connects anew to a peer whose read has failed.
        inbox: where reads and hashes report their end.
        verify_pages: the pages to compare.
        timeout: seconds that a peer may be silent.
        hosts: is told how reads of hosts end.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        agent: Transfers,
        client: Sink[ConnectAnew],
        inbox: Mailbox[PullEnded | PagesHashed],
        verify_pages: VerifyPages,
        timeout: float,
        hosts: ReadableHosts,
    ) -> None:
        self._context = context
        self._requests = requests
        self._agent = agent
        self._client = client
        self._inbox = inbox
        self._verify_pages = verify_pages
        self._slowest = TIMEOUTS_A_READ * timeout
        self._hosts = hosts

    def read(self, request: HandedOverRequest, message: Announce) -> None:
        """Start to read the announced pages straight into the reserved ones."""
        peer = request.peer
        request.enter(Phase.ANNOUNCED)
        wanted = request.hand_over.on_announce(message)
        if message.first_tokens:
            request.announced_at = time.monotonic()
        if any(run.page_ids for run in wanted):
            stream = request.stream
            pull = self._agent.pull(
                peer,
                [
                    request.held.pages(pool)[run.first_page : run.end].astype(np.int64)
                    for pool, run in enumerate(wanted)
                ],
                [np.asarray(run.page_ids, np.int64) for run in wanted],
                lambda pull: self._inbox.post(PullEnded(stream, pull)),
                from_host=message.from_host,
            )
            request.pulls.append(pull)
            request.reading.add(pull)
            request.read_at = time.monotonic()
            request.enter(Phase.PULLING)
            if message.from_host:
                request.enter(Phase.LENDING)
        self._finish_if_all_read(request)

    def pull_ended(self, message: PullEnded) -> None:
        """Count a read's end. A failed one ends its request; the last one is followed by Done."""
        pull = message.pull
        self._context.metrics.count_pull(pull)
        self._hosts.note(pull)
        if pull.state is PullState.FAILED:
            self._context.outbox.put(self._client, ConnectAnew(message.stream.peer))
        request = self._requests.of_stream(message.stream)
        if request is None:
            return
        _trace_pull(request, pull)
        if pull.state is not PullState.DONE:
            error = f"read from {pull.peer} failed: {pull.error}"
            self._requests.fail(request, FailureReason.READ_FAILED, error)
            return
        if pull not in request.reading:  # its end was told before
            self._context.metrics.count_dropped(Dropped.DUPLICATE)
            return
        request.reading.remove(pull)
        request.read_at = request.progressed_at = time.monotonic()
        request.hand_over.on_read()
        self._finish_if_all_read(request)

    def pages_hashed(self, message: PagesHashed) -> None:
        """Send the sums of a request's pages with its Done."""
        request = self._requests.of_stream(message.stream)
        if request is not None:
            self._send_done(request, message.sums)

    def fail_if_stuck(self, request: HandedOverRequest, now: float) -> bool:
        """End a request if one of its reads does not end. Returns `True` if so."""
        if not request.reading or now - request.read_at <= self._slowest:
            return False
        error = f"a read has not ended for {self._slowest:g} s"
        states = ", ".join(f"{pull.peer}: {pull.state.name}" for pull in request.reading)
        fields = request.key.fields
        logger.warning("request %r: %s (%s)", fields["request_id"], error, states, extra=fields)
        self._requests.fail(request, FailureReason.READ_FAILED, error)
        return True

    def _finish_if_all_read(self, request: HandedOverRequest) -> None:
        """If all is read, send Done, or first hash the pages to compare."""
        hand_over, held, stream = request.hand_over, request.held, request.stream
        if not hand_over.has_read:
            return
        mode = self._verify_pages
        read = hand_over.places_read if mode is not VerifyPages.OFF else []
        places = choose(mode, read, request.key.request_id)
        if not places:
            self._send_done(request)
            return
        pages = locate(places, held.tables(), held.page_size, request.input_len)
        self._agent.hash_pages(pages, lambda sums: self._inbox.post(PagesHashed(stream, sums)))

    def _send_done(self, request: HandedOverRequest, sums: Sequence[PageSum] = ()) -> None:
        self._requests.send(request, request.hand_over.done(sums))
        request.enter(Phase.PULLED)


def _trace_pull(request: HandedOverRequest, pull: Pull) -> None:
    """Record a read that has ended, by the transfer thread's times."""
    attributes: Attributes = {
        "kvrelay.peer": pull.peer,
        "kvrelay.pages": pull.num_pages,
        "kvrelay.bytes": pull.nbytes,
    }
    error = None if pull.state is PullState.DONE else pull.error
    began = pull.began or time.monotonic()  # a read may fail before it was taken up
    request.record(PULL, began, began + pull.seconds, attributes, error)
