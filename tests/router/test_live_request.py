"""The record of one request: two workers in, one ordered stream out, one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrelay.router.attempt import Attempt
from kvrelay.router.discovery import WorkerRole
from kvrelay.router.errors import InternalFailure, RequestError, Unavailable
from kvrelay.router.events import Completion, Delta, FinishReason, PhaseTimings, Token
from kvrelay.router.fleet import Pair
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


class RecordedLink:
    """Where an attempt submits and cancels."""

    def __init__(self, role: WorkerRole) -> None:
        self.endpoint = ScriptedWorker(f"{role}-0", role).endpoint
        self.submits: list[int] = []
        self.cancels: list[int] = []

    def submit(self, submission: Submission, listener: Any, prefill: Any = None) -> None:
        assert (prefill is None) == (self.endpoint.role is PREFILL)
        self.submits.append(submission.attempt)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancels.append(attempt)


class Run:
    """A live request on two recorded links, and what its outcome was when it ended."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.links: Any = (RecordedLink(PREFILL), RecordedLink(DECODE))
        self.ended: list[LiveRequest] = []
        stream = TextStream(tokenizer, stop=params.get("stop", ()))
        stopwatch = RouterMetrics("m").stopwatch()
        self.live = LiveRequest(made(**params), stream, stopwatch, self.ended.append)
        self.attempt = Attempt(
            Submission(self.live.request, 7, range(1), 0.0), Pair(*self.links), self.live
        )
        self.live.assign(self.attempt)
        self.attempt.submit()

    def say(
        self,
        role: WorkerRole,
        index: int,
        ids: Sequence[int],
        end: WorkerEnd | None = None,
        timings: PhaseTimings | None = None,
    ) -> None:
        tokens = tuple(Token(token_id) for token_id in ids)
        timings = timings or PhaseTimings()
        self.attempt.on_output(role, WorkerOutput("r", 7, index, tokens, timings, end))

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
    assert completion == Completion(FinishReason.LENGTH, None, 3, 3, 0, timings, 5)
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
    assert (completion.finish_reason, completion.matched) == (FinishReason.STOP, 65)
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
    assert isinstance(run.live.outcome, Unavailable)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (WorkerEnd(EndReason.FAILED, error="pull", retryable=True), Unavailable),
        (WorkerEnd(EndReason.FAILED, error="shape"), InternalFailure),
        (ABORTED, Unavailable),
    ],
)
async def test_a_failure_on_prefill_ends_both(run: Run, end: WorkerEnd, error: type) -> None:
    run.say(PREFILL, 0, [], end)
    assert type(run.live.outcome) is error
    assert "prefill-0" in str(run.live.outcome)
    assert end.error in str(run.live.outcome)
    assert run.cancels[1] == [7]


async def test_a_lost_worker_fails_the_request_after_what_came(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.attempt.on_lost(run.links[1].endpoint, "socket closed")
    deltas, error = await run.events()
    assert len(deltas) == 1
    assert isinstance(error, Unavailable)
    assert "decode-0" in str(error)
    assert run.cancels[0] == [7]


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
    assert run.live.outcome.finish_reason is FinishReason.ABORT
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
    assert (completion.matched, completion.completion_tokens) == ("BC", 3)


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
