"""The record of one request: two workers in, one ordered stream out, one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrelay.router.attempt import Attempt
from kvrelay.router.choice import Choice, StopRules
from kvrelay.router.discovery import WorkerRole
from kvrelay.router.errors import InternalFailure, RequestError, Unavailable
from kvrelay.router.events import (
    ChoiceEnd,
    Completion,
    Delta,
    FinishReason,
    PhaseTimings,
    Token,
)
from kvrelay.router.fleet import Placement
from kvrelay.router.generation import GenerationRequest, Submission
from kvrelay.router.limits import Limits
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.text import TextStream
from kvrelay.router.validation import Validator
from kvrelay.router.worker_output import EndReason, WorkerEnd, WorkerOutput
from kvrelay.v1 import inference_pb2 as pb

from .scripted_worker import ScriptedWorker

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
HANDED_OVER = WorkerEnd(EndReason.HANDED_OVER)
LENGTH = WorkerEnd(EndReason.LENGTH)
ABORTED = WorkerEnd(EndReason.ABORTED)
RETRACTED = WorkerEnd(EndReason.RETRACTED)


class RecordedLink:
    """Where an attempt submits and cancels."""

    def __init__(self, role: WorkerRole) -> None:
        self.endpoint = ScriptedWorker(f"{role}-0", role).endpoint
        self.submits: list[int] = []
        self.cancels: list[int] = []
        self.hurried: list[int] = []
        self.draining = False

    def submit(self, submission: Submission, listener: Any, prefill: Any = None) -> None:
        assert (prefill is None) == (self.endpoint.role is PREFILL)
        self.submits.append(submission.attempt)

    def cancel(self, request_id: str, attempt: int) -> None:
        if attempt not in self.cancels:  # the second one finds nothing
            self.cancels.append(attempt)

    def give_up(self, request_id: str, attempt: int) -> None:
        self.hurried.append(attempt)


class RecordedKeeper:
    """Who hears of an attempt's early ends."""

    def __init__(self) -> None:
        self.retractions: list[int] = []
        self.failures: list[tuple[set[int], str]] = []
        self.stales = 0

    def retracted(self, choices: Any, detail: str) -> None:
        self.retractions += sorted(choices)

    def failed(self, choices: Any, error: Unavailable, reason: str, suspects: Any) -> None:
        self.failures.append((set(choices), str(error)))

    def stale(self) -> None:
        self.stales += 1


class Run:
    """A live request on two recorded links, and what its outcome was when it ended."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.links: Any = (RecordedLink(PREFILL), RecordedLink(DECODE))
        self.ended: list[LiveRequest] = []
        self.keeper = RecordedKeeper()
        request = made(**params)
        sampling = request.sampling
        rules = StopRules(sampling.max_tokens, sampling.min_tokens, frozenset([400]))
        choices = [
            Choice(index, TextStream(tokenizer, stop=sampling.stop), rules)
            for index in range(sampling.n)
        ]
        self.live = LiveRequest(request, choices, RouterMetrics("m").stopwatch(), self.ended.append)
        submission = Submission(request, 7, range(sampling.n), 0.0)
        placement = Placement(self.links[1], self.links[0])
        self.attempt = Attempt(submission, placement, self.live, self.keeper)
        self.live.assign(self.attempt)
        self.attempt.submit()

    def say(
        self,
        role: WorkerRole,
        index: int,
        ids: Sequence[int],
        end: WorkerEnd | None = None,
        timings: PhaseTimings | None = None,
        **fields: Any,
    ) -> None:
        tokens = tuple(Token(token_id) for token_id in ids)
        timings = timings or PhaseTimings()
        self.attempt.on_output(role, WorkerOutput("r", 7, index, tokens, timings, end, **fields))

    async def events(self) -> tuple[list[Delta], Completion | RequestError]:
        deltas: list[Delta] = []
        try:
            with self.live.reader() as events:
                async for event in events:
                    if isinstance(event, Completion):
                        return deltas, event
                    deltas.append(event)
        except RequestError as error:
            return deltas, error
        raise AssertionError("no outcome")

    @property
    def cancels(self) -> list[list[int]]:
        return [link.cancels for link in self.links]


def made(**params: Any) -> GenerationRequest:
    validator = Validator("m", lambda text: [], 16, 1 << 20)
    message = pb.GenerateRequest(request_id="r", sampling_params=pb.SamplingParams(**params))
    message.input_ids.ids.extend([1, 2, 3])
    return validator.validate(message, Limits(402, 512, 512, 512))


@pytest.fixture
def run(tokenizer: Tokenizer) -> Run:
    return Run(tokenizer, seed=5)


async def test_tokens_of_both_workers_in_order(run: Run) -> None:
    assert [link.submits for link in run.links] == [[7], [7]]
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue=1, prefill=2))
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [67], LENGTH, PhaseTimings(transfer=3, decode=4))
    deltas, completion = await run.events()
    assert [(d.index, [t.token_id for t in d.tokens]) for d in deltas] == [
        (0, [65]),
        (1, [66]),
        (2, [67]),
    ]
    timings = PhaseTimings(1, 2, 3, 4)
    end = ChoiceEnd(FinishReason.LENGTH, None)
    assert completion == Completion((end,), 3, 3, 0, timings, 5)
    assert run.ended == [run.live]


async def test_decode_overtakes_prefill(run: Run) -> None:
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [67], LENGTH)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], HANDED_OVER)
    deltas, completion = await run.events()
    assert [t.token_id for d in deltas for t in d.tokens] == [65, 66, 67]
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 3


async def test_an_end_without_tokens_waits_for_the_first_token(run: Run) -> None:
    run.say(DECODE, 1, [], LENGTH)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert isinstance(run.live.outcome, Completion)


async def test_prefill_completes_and_decode_is_cancelled_quietly(run: Run) -> None:
    run.say(PREFILL, 0, [65], WorkerEnd(EndReason.STOP, matched=65))
    assert run.cancels[1] == [7]
    run.say(DECODE, 0, [], ABORTED)
    deltas, completion = await run.events()
    assert isinstance(completion, Completion)
    assert completion.choices == (ChoiceEnd(FinishReason.STOP, 65),)
    assert [(len(d.tokens), d.text) for d in deltas] == [(1, "")]


async def test_decode_gives_up_because_prefill_completed(run: Run) -> None:
    run.say(DECODE, 0, [], ABORTED)
    assert run.live.outcome is None
    run.say(PREFILL, 0, [65], LENGTH)
    assert isinstance(run.live.outcome, Completion)


@pytest.mark.parametrize("decode_first", [True, False])
async def test_decode_gives_up_what_was_handed_over(run: Run, decode_first: bool) -> None:
    ends: list[Any] = [(DECODE, 1, [], ABORTED), (PREFILL, 0, [65], HANDED_OVER)]
    for end in ends if decode_first else reversed(ends):
        run.say(*end)
    assert run.keeper.failures == [({0}, "decode-0: aborted")]


@pytest.mark.parametrize(
    "end", [WorkerEnd(EndReason.FAILED, error="pull", retryable=True), ABORTED]
)
async def test_a_failure_on_prefill_ends_the_attempt_on_both(run: Run, end: WorkerEnd) -> None:
    run.say(PREFILL, 0, [], end)
    assert run.keeper.failures == [({0}, f"prefill-0: {end.error or 'aborted'}")]
    assert run.live.outcome is None
    assert run.cancels[1] == [7]


async def test_a_failure_for_good_ends_the_request(run: Run) -> None:
    run.say(PREFILL, 0, [], WorkerEnd(EndReason.FAILED, error="shape"))
    assert isinstance(run.live.outcome, InternalFailure)
    assert str(run.live.outcome) == "prefill-0: shape"
    assert run.keeper.failures == []
    assert run.cancels[1] == [7]


async def test_a_lost_worker_ends_the_attempt_once(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.attempt.on_lost(run.links[1].endpoint, "socket closed")
    run.attempt.on_lost(run.links[0].endpoint, "socket closed")
    assert run.keeper.failures == [({0}, "worker decode-0 was lost: socket closed")]
    assert run.live.outcome is None
    assert run.cancels[0] == [7]
    run.say(DECODE, 1, [66])
    assert run.keeper.stales == 1
    assert list(run.live.choices[0].emitted) == [65]


async def test_a_retraction_waits_for_prefills_word(run: Run) -> None:
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [], RETRACTED)
    assert run.keeper.retractions == []
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert run.keeper.retractions == [0]
    assert list(run.live.choices[0].emitted) == [65, 66]


async def test_a_retracted_choice_leaves_the_others_in_the_attempt(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    for choice in range(3):
        run.say(PREFILL, 0, [65 + choice], HANDED_OVER, choice=choice)
    run.say(DECODE, 1, [], RETRACTED, choice=1)
    assert run.keeper.retractions == [1]
    assert run.cancels == [[], []]
    run.say(DECODE, 1, [99], choice=1)
    assert run.keeper.stales == 1
    for choice in (0, 2):
        run.say(DECODE, 1, [70], LENGTH, choice=choice)
    assert run.live.outcome is None
    assert run.cancels == [[7], [7]]  # nothing is left of the attempt
    assert list(run.live.choices[1].emitted) == [66]


async def test_a_failure_is_of_every_choice_that_has_not_ended(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    run.say(PREFILL, 0, [65], LENGTH, choice=1)
    run.say(DECODE, 0, [], WorkerEnd(EndReason.FAILED, error="x", retryable=True), choice=0)
    run.say(DECODE, 0, [], WorkerEnd(EndReason.FAILED, error="x", retryable=True), choice=2)
    assert run.keeper.failures == [({0, 2}, "decode-0: x")]


# What is left when an attempt is over before its choice's end.


async def test_what_waits_behind_a_gap_is_forgotten(run: Run) -> None:
    run.say(DECODE, 1, [66], LENGTH)
    run.live.interrupt(0)
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert list(run.live.choices[0].emitted) == [65]
    assert run.live.outcome is None


@pytest.mark.parametrize(
    ("params", "letters", "end"),
    [
        ({"max_tokens": 2}, "xy", ChoiceEnd(FinishReason.LENGTH, None)),
        ({"stop": ["yz"]}, "xyz", ChoiceEnd(FinishReason.STOP, "yz")),
    ],
)
async def test_complete_output_needs_no_other_attempt(
    tokenizer: Tokenizer, params: Any, letters: str, end: ChoiceEnd
) -> None:
    run = Run(tokenizer, **params)
    run.say(PREFILL, 0, [tokenizer.token_to_id(letter) for letter in letters], HANDED_OVER)
    assert run.live.outcome is None
    run.live.interrupt(0)
    deltas, completion = await run.events()
    assert isinstance(completion, Completion)
    assert completion.choices == (end,)
    assert "".join(delta.text for delta in deltas) == ("x" if "stop" in params else "xy")


@pytest.mark.parametrize("min_tokens", [2, 3])
async def test_an_end_of_sequence_is_complete_from_min_tokens_on(
    tokenizer: Tokenizer, min_tokens: int
) -> None:
    run = Run(tokenizer, min_tokens=min_tokens)
    run.say(PREFILL, 0, [65, 400], HANDED_OVER)
    run.live.interrupt(0)
    ended = run.live.choices[0].ended
    assert ended == (ChoiceEnd(FinishReason.STOP, 400) if min_tokens == 2 else None)


async def test_timings_add_up_over_attempts(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue=1, prefill=2))
    run.say(DECODE, 1, [66], None, PhaseTimings(decode=3))
    run.live.interrupt(0)
    run.say(PREFILL, 2, [67], None, PhaseTimings(queue=0.5, prefill=1))
    run.say(DECODE, 3, [68], LENGTH, PhaseTimings(transfer=4, decode=1))
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.timings == PhaseTimings(1.5, 3, 4, 4)


async def test_the_outcome_never_changes(run: Run) -> None:
    run.live.abort()
    outcome = run.live.outcome
    run.say(DECODE, 0, [65], LENGTH)
    run.attempt.on_lost(run.links[0].endpoint, "x")
    run.live.abort()
    assert run.live.outcome is outcome
    assert run.ended == [run.live]


async def test_every_reader_sees_all_from_the_first(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    with run.live.reader() as early:
        assert isinstance(await anext(early), Delta)
        run.say(DECODE, 1, [66], LENGTH)
        late = await run.events()
        rest = [event async for event in early]
    assert len(late[0]) == 2
    assert rest == [late[0][1], late[1]]


async def test_the_last_reader_to_leave_aborts(run: Run) -> None:
    with run.live.reader():
        with run.live.reader():
            pass
        assert run.live.outcome is None
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.choices == (ChoiceEnd(FinishReason.ABORT, None),)
    assert run.cancels == [[7], [7]]


async def test_an_abort_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["AB"])
    run.say(PREFILL, 0, [tokenizer.token_to_id("A")], HANDED_OVER)
    run.live.abort()
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["", "A"]
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 1


async def test_a_stop_string_is_cut_but_its_tokens_count(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["BC"])
    a, b, c = (tokenizer.token_to_id(letter) for letter in "ABC")
    run.say(PREFILL, 0, [a], HANDED_OVER)
    run.say(DECODE, 1, [b])
    run.say(DECODE, 2, [c], WorkerEnd(EndReason.STOP, matched="BC"))
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["A", "", ""]
    assert isinstance(completion, Completion)
    assert (completion.choices[0].matched, completion.completion_tokens) == ("BC", 3)


async def test_a_matched_token_has_no_text(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop_token_ids=[66])
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.say(DECODE, 1, [66], WorkerEnd(EndReason.STOP, matched=66))
    deltas, completion = await run.events()
    assert "".join(delta.text for delta in deltas) == tokenizer.decode([65])
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 2


async def test_output_that_cannot_be_rendered_fails_its_request_alone(run: Run) -> None:
    run.say(PREFILL, 0, [-1], HANDED_OVER)
    assert isinstance(run.live.outcome, InternalFailure)
