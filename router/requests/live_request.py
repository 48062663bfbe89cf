"""One request from its admission to its outcome.

Calls go downwards; a callee returns a value and knows none of its callers::

    LiveRequest           whatever happens to the request comes in here: readers come and go,
    │                     workers report or are lost, somebody aborts it, the router stops
    ├── OutputStream      makes events for the readers, and holds the outcome
    ├── Attempt           sends commands to workers; turns their ends into a verdict
    └── Failover          finds workers, and decides whether and when to retry

Only methods of `LiveRequest` change the stream, and each calls `_settle` at its end: readers are
sent the new events. With the outcome, whatever its cause, the attempts and the waiting submissions
are cancelled, and `on_end` is called, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from typing import Any

from kvrelay.router.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalFailure,
    ReadersFull,
    RequestError,
)
from kvrelay.router.generation import GenerationRequest, Submission, in_full_on
from kvrelay.router.metrics import (
    PLACEMENTS,
    RESUBMISSIONS,
    STALE_OUTPUTS,
    RouterMetrics,
    Stopwatch,
)
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.fleet import Placement
from kvrelay.router.requests.attempt import Attempt, AttemptFailed, RequestFailed, Verdict
from kvrelay.router.requests.events import Completion
from kvrelay.router.requests.failover import Failover, Retry
from kvrelay.router.requests.output_stream import OutputStream
from kvrelay.router.requests.readers import MOST_READERS, Reader, Readers
from kvrelay.router.requests.request_trace import RequestTrace, Resubmission, told_of
from kvrelay.wire.output import RequestOutput, SampledToken
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)


class LiveRequest:
    """A request with an attempt on every unfinished choice, until the outcome.

    When its last reader leaves before the outcome, the request is aborted. If that reader was too
    slow, or left because of its deadline, the request fails.

    Args:
        request: the validated request.
        stream: the request's output.
        readers: the readers of that stream.
        failover: finds workers for it, and decides on its retries.
        metrics: the router's.
        stopwatch: runs since it arrived.
        attempt_numbers: numbers that never repeat on a router.
        on_end: called once, when it has its outcome.
        trace: the trace of a traced request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        stream: OutputStream,
        readers: Readers,
        failover: Failover,
        metrics: RouterMetrics,
        stopwatch: Stopwatch,
        attempt_numbers: Iterator[int],
        on_end: Callable[[LiveRequest], None],
        trace: RequestTrace | None = None,
    ) -> None:
        self.request = request
        self.generated_on = ""
        """The incarnation of the worker that generates, or did last; empty: none did."""
        self.waits_for_workers = False
        """Whether it has had no attempt yet, because no workers could take it."""
        self._stream = stream
        self._failover = failover
        self._metrics = metrics
        self._stopwatch = stopwatch
        self._attempt_numbers = attempt_numbers
        self._on_end = on_end
        self._trace = trace
        self._readers = readers
        self._at_deadline: asyncio.TimerHandle | None = None
        self._attempts: dict[int, Attempt] = {}  # by number; those that are not over
        self._submissions: set[asyncio.Task[None]] = set()
        self._lost_attempts: set[int] = set()
        self._told_killed: set[tuple[int, int]] = set()  # attempts and choices
        self._closed = False

    @property
    def outcome(self) -> Completion | RequestError | None:
        """The end of the request; None: it has not ended."""
        return self._stream.outcome

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields of a log message about the request, beside its text."""
        trace_id = None if self._trace is None else self._trace.trace_id
        return {"request_id": self.request.request_id, "trace_id": trace_id}

    @property
    def output_ids(self) -> list[Sequence[int]]:
        """The tokens that its readers have received, of each choice."""
        return [choice.emitted for choice in self._stream.choices]

    @property
    def streaming(self) -> bool:
        """Whether its first token has come, of any choice."""
        return self._stream.streaming

    @property
    def history(self) -> Sequence[int] | None:
        """Prompt and output, if the request is a turn that has ended well."""
        return self._stream.history

    @property
    def history_digest(self) -> str:
        """The digest of its history; empty: it has none."""
        outcome = self.outcome
        return outcome.history_digest if isinstance(outcome, Completion) else ""

    def check_join(self, fingerprint: bytes, retry_after_ms: int) -> None:
        """Check that a request with this one's id may join it.

        Raises:
            AlreadyExists: it has another body.
            ReadersFull: this one has `MOST_READERS` already.
        """
        if self.request.fingerprint != fingerprint:
            raise AlreadyExists(self.request.request_id)
        if len(self._readers) >= MOST_READERS:
            raise ReadersFull(self.request.request_id, MOST_READERS, retry_after_ms)

    def start(self, placement: Placement) -> None:
        """Submit all choices to these workers, as the first attempt."""
        self._stopwatch.admitted(len(self.request.input_ids))
        self._submit(range(self.request.params.n), placement)

    def start_later(self) -> None:
        """Submit all choices once there are workers for them; fail if none come in time."""
        self._stopwatch.admitted(len(self.request.input_ids))
        self.waits_for_workers = True
        self._run(self._start_when_placed())

    async def _start_when_placed(self) -> None:
        with self._ending_with_its_errors():
            placement = await self._failover.place_first(
                self.request, lambda: self._readers.deadline
            )
            self.waits_for_workers = False
            self._submit(range(self.request.params.n), placement)

    # Calls from clients and the router's stop.

    @contextlib.contextmanager
    def reader(
        self, timeout: asyncio.Timeout | None = None, deadline: float | None = None
    ) -> Iterator[Reader]:
        """Attach a reader for as long as the context lasts.

        The reader gets the serialized events: all deltas from the first, then the completion. If
        the outcome is an error, it is raised instead.

        Args:
            timeout: a timeout that is made to expire when the reader has been too slow.
            deadline: the call's, on the clock of `time.monotonic`. The request fails at the latest
                of its readers' deadlines, if all have one.
        """
        reader = self._readers.attach(timeout, deadline)
        self._watch_deadline()
        try:
            yield reader
        finally:
            self._readers.detach(reader)
            if len(self._readers):
                self._watch_deadline()
            elif (error := reader.error) is not None:
                self.fail(error)
            else:
                self.abort()

    def abort(self) -> None:
        """Complete the request with the tokens so far; do nothing if it has its outcome."""
        self._stream.abort()
        self._settle()

    def fail(self, error: RequestError) -> None:
        """End the request with an error; do nothing if it has its outcome."""
        self._stream.fail(error)
        self._settle()

    def _watch_deadline(self) -> None:
        if self._at_deadline is not None:
            self._at_deadline.cancel()
            self._at_deadline = None
        deadline = self._readers.deadline
        if deadline is not None and self.outcome is None:
            loop, error = asyncio.get_running_loop(), DeadlineExceeded("while it was served")
            self._at_deadline = loop.call_at(deadline, self.fail, error)

    # Reports of workers: `worker_link.Listener`.

    def on_output(self, role: WorkerRole, output: RequestOutput) -> None:
        """Take tokens that a worker produced for a choice, or the choice's end."""
        if self.outcome is not None:
            return
        try:  # for each token: a context manager costs more
            attempt = self._attempts.get(output.key.attempt)
            if attempt is not None and attempt.works_on(output.key.choice):
                self._take(attempt, role, output)
            elif output.tokens:
                self._metrics.count(STALE_OUTPUTS)
        except Exception as error:
            self._end_with(error)
        self._settle()

    def on_token(
        self, role: WorkerRole, attempt: int, choice: int, index: int, token_id: int
    ) -> None:
        """Take one token without an end, as `on_output` does."""
        if self.outcome is not None:
            return
        try:
            running = self._attempts.get(attempt)
            if running is None or not running.works_on(choice):
                self._metrics.count(STALE_OUTPUTS)
            elif self._stream.take_next(attempt, choice, index, token_id):
                if self._trace is not None:
                    self._trace.token_came()
            else:
                key, token = RequestKey("", "", attempt, choice), SampledToken(token_id)
                self._take(running, role, RequestOutput(key, index, (token,)))
        except Exception as error:
            self._end_with(error)
        self._settle()

    def on_lost(self, attempt: int, endpoint: WorkerInfo, detail: str) -> None:
        """Take the loss of a worker that has released this attempt, or died with it."""
        self._lost_attempts.add(attempt)
        lost = self._attempts.get(attempt)
        if self.outcome is None and lost is not None:
            with self._ending_with_its_errors():
                self._act_on(lost, lost.on_lost(endpoint, detail))

    def has_lost(self, attempt: int) -> bool:
        """Whether this attempt at the request was lost with a worker."""
        return attempt in self._lost_attempts

    def on_killed(self, output: RequestOutput) -> None:
        """Take a report that a lost attempt was in the forward that killed its worker."""
        if self.outcome is not None or output.end is None or output.end.cause is None:
            return
        choice, end = output.key.choice, output.end
        told = (output.key.attempt, choice)
        if told in self._told_killed:  # repeated whenever the link is made anew
            return
        self._told_killed.add(told)
        emitted = len(self._stream.choices[choice].emitted)
        with self._ending_with_its_errors():
            self._failover.forward_failed(
                choice, emitted, f"of attempt {output.key.attempt}", output.end.cause, end.error
            )

    @contextlib.contextmanager
    def _ending_with_its_errors(self) -> Iterator[None]:
        """Fail this request alone with any error raised within; close it if it is over."""
        try:
            yield
        except Exception as error:
            self._end_with(error)
        self._settle()

    def _end_with(self, error: Exception) -> None:
        if not isinstance(error, RequestError):
            _log.exception("request %r", self.request.request_id, extra=self.log_fields)
            error = InternalFailure(f"router: {error}")
        self._stream.fail(error)

    def _take(self, attempt: Attempt, role: WorkerRole, output: RequestOutput) -> None:
        choice = output.key.choice
        self._stream.take(output)
        if self._trace is not None and output.tokens:
            self._trace.token_came()
        if self._stream.choices[choice].ended is not None:
            attempt.end_choice(choice)
            self._trace_end_of(attempt)
        elif output.end is not None:
            self._act_on(attempt, attempt.on_end(role, choice, output.end))

    def _settle(self) -> None:
        """Send readers the new events, and close the request if it is over."""
        self._readers.go_on()
        if self.outcome is not None and not self._closed:
            self._close(self.outcome)

    def _close(self, outcome: Completion | RequestError) -> None:
        self._closed = True
        if self._trace is not None:
            self._trace.ended(outcome)
        if self._at_deadline is not None:
            self._at_deadline.cancel()
        for task in self._submissions:
            task.cancel()
        for attempt in self._attempts.values():
            attempt.cancel()
        self._attempts.clear()
        self._on_end(self)

    # Retries.

    def _act_on(self, attempt: Attempt, verdict: Verdict | None) -> None:
        """Retry the choices that an attempt left unfinished; raise the request's error."""
        if verdict is None:
            return
        self._trace_end_of(attempt, verdict)
        if isinstance(verdict, RequestFailed):
            raise verdict.error
        for choice in verdict.choices:
            self._stream.interrupt(choice)
        choices = self._stream.choices
        left = [choice for choice in verdict.choices if choices[choice].ended is None]
        unfinished = {choice: len(choices[choice].emitted) for choice in left}
        retry = self._failover.decide(verdict, unfinished)
        for batch in self._batches(unfinished.keys()):
            self._metrics.count(RESUBMISSIONS, reason=retry.reason)
            self._run(self._retry(batch, retry, attempt.number))

    def _batches(self, choices: Set[int]) -> list[range]:
        """Group these choices for submission: one by one, or neighbours without emitted tokens."""
        batches: list[range] = []
        for choice in sorted(choices):
            last = batches[-1] if batches else range(0)
            if last and last.stop == choice and not self._emitted((last[0], choice)):
                batches[-1] = range(last.start, choice + 1)
            else:
                batches.append(range(choice, choice + 1))
        return batches

    def _run(self, submission: Coroutine[Any, Any, None]) -> None:
        """Run a submission, until the request's end at most."""
        task = asyncio.create_task(submission)
        self._submissions.add(task)
        task.add_done_callback(self._submissions.discard)

    async def _retry(self, choices: range, retry: Retry, after: int) -> None:
        with self._ending_with_its_errors():
            await asyncio.sleep(retry.pause_seconds)
            in_full = in_full_on(self._stream.prompt_logprobs_due, self._failover.alone(choices))
            demand = Demand.of_retry(self.request, len(self._emitted(choices)), in_full)
            placement = await self._failover.place(demand, retry.detail)
            self._submit(choices, placement, Resubmission(after, retry.reason))

    def _submit(
        self, choices: range, placement: Placement, before: Resubmission | None = None
    ) -> None:
        submission = Submission.of(
            self.request,
            next(self._attempt_numbers),
            choices,
            self._stopwatch.seconds,
            emitted=self._emitted(choices),
            prompt_logprobs=self._stream.prompt_logprobs_due,
            alone=self._failover.alone(choices),
        )
        if self._trace is not None:
            submission = submission.traced(self._trace.submitted(submission, placement, before))
        self._attempts = {n: one for n, one in self._attempts.items() if one.open_choices}
        self.generated_on = placement.decode.endpoint.incarnation
        attempt = self._attempts[submission.attempt] = Attempt(submission, placement)
        attempt.submit(self)
        self._metrics.count(
            PLACEMENTS,
            computed_by=placement.computes_prompt.endpoint.role.value,
            reason=placement.reason.value,
        )

    def _trace_end_of(self, attempt: Attempt, verdict: Verdict | None = None) -> None:
        if self._trace is None or attempt.open_choices:
            return
        error = None
        if isinstance(verdict, AttemptFailed | RequestFailed):
            error = told_of(verdict.error)
        self._trace.attempt_ended(attempt.number, error)

    def _emitted(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The tokens that these choices have emitted, one choice after the other."""
        emitted = (self._stream.choices[choice].emitted for choice in choices)
        return tuple(itertools.chain.from_iterable(emitted))
