"""One request's output, as its readers see it: events in order, and one outcome.

Tokens take one of two ways through `OutputStream`, `Choice` and `TokenMerge`. `take` serves every
report: tokens in any order, with ends, timings and scores. Nearly all reports bring one token, the
next of its choice, and nothing else. `take_next` serves those without the objects of `take`: a
router has one core for the tokens of all streams. It refuses whatever is not so plain, which then
takes the first way. Both publish the same events.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvrelay.router.errors import AlreadyExists, RequestError
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import Stopwatch
from kvrelay.router.requests.events import Completion, Delta, Event, FinishReason
from kvrelay.router.requests.output_choice import Choice
from kvrelay.wire.history_digest import history_digest
from kvrelay.wire.output import PhaseTimings, RequestOutput, SampledToken

_MAX_PROMPT_LOGPROBS: Final = 1024
"""The most logprobs of one delta: 300 KB with 20 alternatives; many clients allow only 4 MiB."""

_NOTHING: Final = array("I")

Form = Callable[[Event], bytes]
"""A function that serializes an event for the request's readers, as their door speaks."""


class OutputStream:
    """One stream of events from the workers' reports, for any number of readers.

    The deltas of each choice are in order. All events are kept until the request is over, for
    readers that come late, unless `drop` gives up those that have been read. They are kept as the
    bytes that each reader is sent: with log-probabilities, a tenth of the objects' size. There is
    exactly one outcome, a completion or an error. Once set it never changes, and later reports must
    not be given here. The stream has no callbacks: after each call, its owner wakes the readers and
    looks at `outcome`.

    Args:
        request: the validated request.
        choices: its outputs, in order.
        stopwatch: runs since the request arrived.
        form: called once for each event, in order.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choices: Sequence[Choice],
        stopwatch: Stopwatch,
        form: Form,
    ) -> None:
        self.choices = tuple(choices)
        self.outcome: Completion | RequestError | None = None
        self.history: array[int] | None = None
        """Prompt and output of a session's turn that has ended well."""
        self.published_bytes = 0
        """The bytes of all events."""
        self.kept_bytes = 0
        """The bytes of those that are kept."""
        self._request = request
        self._stopwatch = stopwatch
        self._form = form
        self._first_attempt: int | None = None  # the one that brought the first token
        self._cached_tokens = 0
        self._num_prompt_logprobs = 0  # those of prompt tokens from the second on
        self._events: list[bytes] = []
        self._num_dropped = 0  # events before the first of these

    def is_coming(self, number: int) -> bool:
        """Whether the event of this number is not there yet, and may come."""
        return number >= self.num_events and self.outcome is None

    def event(self, number: int) -> bytes | None:
        """The event of this number, from 0, unless it `is_coming`; None: the stream has no more.

        All deltas come first, then the completion. Raises the outcome if that is an error, and
        `AlreadyExists` for an event that was dropped.
        """
        if number < self._num_dropped:
            what = "whose beginning is no longer kept (--max-unread-bytes)"
            raise AlreadyExists(self._request.request_id, what)
        if number < self.num_events:
            return self._events[number - self._num_dropped]
        if isinstance(self.outcome, RequestError):
            raise self.outcome
        return None

    @property
    def num_events(self) -> int:
        """The number of events so far."""
        return self._num_dropped + len(self._events)

    def drop(self, number: int) -> None:
        """Keep the events before this number no longer: all readers that there are have them."""
        dropped = self._events[: max(number - self._num_dropped, 0)]
        del self._events[: len(dropped)]
        self._num_dropped += len(dropped)
        self.kept_bytes -= sum(map(len, dropped))

    @property
    def streaming(self) -> bool:
        """Whether the first token has come, of any choice."""
        return any(choice.emitted for choice in self.choices)

    @property
    def prompt_logprobs_due(self) -> int | None:
        """Log-probabilities still wanted at each position of the prompt; None: none at all."""
        is_due = self._num_prompt_logprobs < len(self._request.input_ids) - 1
        return self._request.params.prompt_logprobs if is_due else None

    def take(self, output: RequestOutput) -> None:
        """Add a worker's tokens, which may come in any order, and the end that it reports."""
        if output.tokens and self._first_attempt is None:
            self._first_attempt = output.key.attempt
        if output.key.attempt == self._first_attempt:  # a later one finds its own pages cached
            self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if output.prompt_logprobs:
            self._take_prompt_logprobs(output)
        delta, contradicted = self.choices[output.key.choice].take(output)
        if contradicted:
            self._stopwatch.contradicted(contradicted)
        self._publish(delta)
        if self.choices[output.key.choice].ended is not None:
            self._complete_if_ended()

    def take_next(self, attempt: int, choice: int, index: int, token_id: int) -> bool:
        """Add a worker's token without an end, if it is the choice's next.

        Returns False, and adds nothing, if it is not the next, or if more may be new than this
        token.
        """
        text = self.choices[choice].take_next(index, token_id)
        if text is None:
            return False
        if self._first_attempt is None:
            self._first_attempt = attempt
        self._publish(Delta(index, (SampledToken(token_id),), text, choice))
        return True

    def _take_prompt_logprobs(self, output: RequestOutput) -> None:
        """Publish the log-probabilities that have not come before, from an earlier attempt."""
        known = self._num_prompt_logprobs - (output.prompt_index - 1)
        new = output.prompt_logprobs[known:] if known >= 0 else ()
        self._num_prompt_logprobs += len(new)
        for start in range(0, len(new), _MAX_PROMPT_LOGPROBS):
            piece = new[start : start + _MAX_PROMPT_LOGPROBS]
            self._publish(Delta(0, (), "", prompt_logprobs=piece))

    def interrupt(self, choice: int) -> None:
        """Interrupt a choice whose attempt is over before the choice; see `Choice.interrupt`."""
        self._publish(self.choices[choice].interrupt())
        self._complete_if_ended()

    def abort(self) -> None:
        """Complete the request with the tokens so far; do nothing if it has its outcome."""
        if self.outcome is None:
            for choice in self.choices:
                self._publish(choice.abort())
            self._complete(FinishReason.ABORT)

    def fail(self, error: RequestError) -> None:
        """End the request with an error; do nothing if it has its outcome."""
        if self.outcome is None:
            self._end(error, error.outcome)

    def _publish(self, delta: Delta | None) -> None:
        if delta is None:
            return
        self._keep(delta)
        if delta.tokens:
            self._stopwatch.delta(delta.choice, len(delta.tokens))

    def _complete_if_ended(self) -> None:
        ends = [choice.ended for choice in self.choices]
        if self.outcome is None and ends[0] is not None and None not in ends:
            self._complete(ends[0].finish_reason)

    def _complete(self, label: FinishReason) -> None:
        timings, turn = PhaseTimings(), self._request.turn
        if turn is not None and label is not FinishReason.ABORT:
            emitted = array("I", self.choices[0].emitted)
            self.history = array("I", self._request.input_ids) + emitted
        for choice in self.choices:
            timings = timings.merged(choice.timings)
        completion = Completion(
            choices=tuple(choice.ended for choice in self.choices if choice.ended is not None),
            prompt_tokens=len(self._request.input_ids),
            completion_tokens=sum(len(choice.emitted) for choice in self.choices),
            cached_tokens=self._cached_tokens,
            timings=timings,
            seed=self._request.params.sampling.seed,
            history_digest=self._history_digest(),
        )
        self._stopwatch.completed(timings, self._cached_tokens)
        self._end(completion, label)

    def _history_digest(self) -> str:
        """The digest of the session's present history; empty: no session, or a closed one."""
        turn = self._request.turn
        return "" if turn is None or turn.is_over else history_digest(self.history or _NOTHING)

    def _keep(self, event: Event) -> None:
        kept = self._form(event)
        self._events.append(kept)
        self.published_bytes += len(kept)
        self.kept_bytes += len(kept)

    def _end(self, outcome: Completion | RequestError, label: str) -> None:
        if isinstance(outcome, Completion):
            self._keep(outcome)
        self.outcome = outcome
        self._stopwatch.ended(label)
