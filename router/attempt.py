"""One try at a request: the prefill worker and the decode worker that it runs on."""

from __future__ import annotations

import logging

from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.router.errors import InternalFailure, Unavailable
from kvrelay.router.fleet import Pair
from kvrelay.router.generation import Submission
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.worker_output import EndReason, WorkerEnd, WorkerOutput

_log = logging.getLogger(__name__)

_COMPLETING = {EndReason.STOP, EndReason.LENGTH}


class Attempt:
    """Carries what two workers say of one attempt to its request.

    ======== =========== ==========================================
    from     end         means
    ======== =========== ==========================================
    either   stop,       the request is complete once every token
             length      before the end is here
    prefill  handed over the decode side goes on
    decode   aborted     prefill has the say: it may have completed
                         the request and ended the hand-over, and
                         its word is still on the way
    either   aborted,    else the request fails
             failed
    ======== =========== ==========================================

    A request that has its outcome ignores the rest.
    """

    def __init__(self, submission: Submission, pair: Pair, live: LiveRequest) -> None:
        self._submission = submission
        self._pair = pair
        self._live = live
        self._handed_over = False
        self._decode_gave_up: WorkerEnd | None = None

    def submit(self) -> None:
        """Sends it to both workers."""
        self._pair.decode.submit(self._submission, self, prefill=self._pair.prefill.endpoint)
        self._pair.prefill.submit(self._submission, self)

    def release(self) -> None:
        """Cancels it wherever it has not ended."""
        for link in (self._pair.prefill, self._pair.decode):
            link.cancel(self._submission.request_id, self._submission.attempt)

    def on_output(self, role: WorkerRole, output: WorkerOutput) -> None:
        """See `Listener`. Whatever goes wrong here fails this request and no other."""
        if self._live.outcome is not None:
            return
        try:
            self._take(role, output)
        except Exception as error:
            _log.exception("output of request %s", output.request_id)
            self._live.fail(InternalFailure(f"router: {error}"))

    def on_lost(self, endpoint: WorkerEndpoint, detail: str) -> None:
        """See `Listener`."""
        self._live.fail(Unavailable(f"worker {endpoint.worker} was lost: {detail}"))

    def _take(self, role: WorkerRole, output: WorkerOutput) -> None:
        end = output.end
        self._live.take(output, end if end and end.reason in _COMPLETING else None)
        if end is None:
            return
        if end.reason is EndReason.HANDED_OVER:
            self._handed_over = True
        elif end.reason is EndReason.ABORTED and role is WorkerRole.DECODE:
            self._decode_gave_up = end
        elif end.reason not in _COMPLETING:
            self._fail(role, end)
        if self._handed_over and self._decode_gave_up:
            self._fail(WorkerRole.DECODE, self._decode_gave_up)

    def _fail(self, role: WorkerRole, end: WorkerEnd) -> None:
        link = self._pair.prefill if role is WorkerRole.PREFILL else self._pair.decode
        text = f"{link.endpoint.worker}: {end.error or end.reason}"
        retryable = end.retryable or end.reason is EndReason.ABORTED
        self._live.fail(Unavailable(text) if retryable else InternalFailure(text))
