"""A live request: reports of two workers go in, one ordered stream and one outcome come out."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrelay.router.errors import InternalFailure
from kvrelay.router.requests.events import ChoiceEnd, Completion, FinishReason
from kvrelay.wire.output import EndReason, PhaseTimings, RequestEnd
from tests.checkpoints import id_of

from .live_run import ABORTED, BROKEN, DECODE, HANDED_OVER, LENGTH, PREFILL, RETRACTED, Run, scored


async def test_tokens_of_both_workers_in_order(run: Run) -> None:
    assert [link.submits for link in run.links] == [[7], [7]]
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue_seconds=1, prefill_seconds=2))
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [67], LENGTH, PhaseTimings(transfer_seconds=3, decode_seconds=4))
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
    run.say(PREFILL, 0, [65], RequestEnd(EndReason.STOP, matched_stop=65))
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
    assert run.failover.failed == [({0}, "decode-0: aborted")]


@pytest.mark.parametrize("end", [BROKEN, ABORTED])
async def test_a_failure_on_prefill_ends_the_attempt_on_both(run: Run, end: RequestEnd) -> None:
    run.say(PREFILL, 0, [], end)
    assert run.failover.failed == [({0}, f"prefill-0: {end.error or 'aborted'}")]
    assert run.live.outcome is None
    assert run.cancels[1] == [7]


async def test_a_failure_for_good_ends_the_request(run: Run) -> None:
    run.say(PREFILL, 0, [], RequestEnd(EndReason.FAILED, error="shape"))
    assert isinstance(run.live.outcome, InternalFailure)
    assert str(run.live.outcome) == "prefill-0: shape"
    assert run.failover.failed == []
    assert run.cancels[1] == [7]


async def test_a_lost_worker_ends_the_attempt_once(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.lose(1)
    run.lose(0)
    assert run.failover.failed == [({0}, "worker decode-0 was lost: socket closed")]
    assert run.live.outcome is None
    assert run.cancels[0] == [7]
    run.say(DECODE, 1, [66])
    assert run.stale_outputs == 1
    assert list(run.stream.choices[0].emitted) == [65]


async def test_a_retraction_waits_for_prefills_word(run: Run) -> None:
    run.say(DECODE, 1, [66])
    run.say(DECODE, 2, [], RETRACTED)
    assert run.failover.retracted == []
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert run.failover.retracted == [0]
    assert list(run.stream.choices[0].emitted) == [65, 66]


async def test_a_retracted_choice_leaves_the_others_in_the_attempt(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    for choice in range(3):
        run.say(PREFILL, 0, [65 + choice], HANDED_OVER, choice=choice)
    run.say(DECODE, 1, [], RETRACTED, choice=1)
    assert run.failover.retracted == [1]
    assert run.cancels == [[], []]
    run.say(DECODE, 1, [99], choice=1)
    assert run.stale_outputs == 1
    for choice in (0, 2):
        run.say(DECODE, 1, [70], LENGTH, choice=choice)
    assert run.live.outcome is None
    assert run.cancels == [[7], [7]]  # nothing is left of the attempt
    assert list(run.stream.choices[1].emitted) == [66]


async def test_a_failure_is_of_every_choice_that_has_not_ended(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, n=3)
    run.say(PREFILL, 0, [65], LENGTH, choice=1)
    run.say(DECODE, 0, [], BROKEN, choice=0)
    run.say(DECODE, 0, [], BROKEN, choice=2)
    assert run.failover.failed == [({0, 2}, "decode-0: pull")]


# What is left when an attempt is over before its choice's end.


async def test_what_waits_behind_a_gap_is_forgotten(run: Run) -> None:
    run.say(DECODE, 1, [66], LENGTH)
    run.stream.interrupt(0)
    run.say(PREFILL, 0, [65], HANDED_OVER)
    assert list(run.stream.choices[0].emitted) == [65]
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
    run.say(PREFILL, 0, [id_of(tokenizer, letter) for letter in letters], HANDED_OVER)
    assert run.live.outcome is None
    run.stream.interrupt(0)
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
    run.stream.interrupt(0)
    ended = run.stream.choices[0].ended
    assert ended == (ChoiceEnd(FinishReason.STOP, 400) if min_tokens == 2 else None)


async def test_timings_add_up_over_attempts(run: Run) -> None:
    run.say(PREFILL, 0, [65], HANDED_OVER, PhaseTimings(queue_seconds=1, prefill_seconds=2))
    run.say(DECODE, 1, [66], None, PhaseTimings(decode_seconds=3))
    run.stream.interrupt(0)
    run.say(PREFILL, 2, [67], None, PhaseTimings(queue_seconds=0.5, prefill_seconds=1))
    run.say(DECODE, 3, [68], LENGTH, PhaseTimings(transfer_seconds=4, decode_seconds=1))
    assert isinstance(run.live.outcome, Completion)
    assert run.live.outcome.timings == PhaseTimings(1.5, 3, 4, 4)


async def test_the_outcome_never_changes(run: Run) -> None:
    run.live.abort()
    outcome = run.live.outcome
    run.say(DECODE, 0, [65], LENGTH)
    run.lose(0)
    run.live.abort()
    assert run.live.outcome is outcome
    assert run.ended == [run.live]


async def test_an_abort_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["AB"])
    run.say(PREFILL, 0, [id_of(tokenizer, "A")], HANDED_OVER)
    run.live.abort()
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["", "A"]
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 1


async def test_a_stop_string_is_cut_but_its_tokens_count(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=["BC"])
    a, b, c = (id_of(tokenizer, letter) for letter in "ABC")
    run.say(PREFILL, 0, [a], HANDED_OVER)
    run.say(DECODE, 1, [b])
    run.say(DECODE, 2, [c], RequestEnd(EndReason.STOP, matched_stop="BC"))
    deltas, completion = await run.events()
    assert [delta.text for delta in deltas] == ["A", "", ""]
    assert isinstance(completion, Completion)
    assert (completion.choices[0].matched_stop, completion.completion_tokens) == ("BC", 3)


async def test_a_matched_token_has_no_text(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop_token_ids=[66])
    run.say(PREFILL, 0, [65], HANDED_OVER)
    run.say(DECODE, 1, [66], RequestEnd(EndReason.STOP, matched_stop=66))
    deltas, completion = await run.events()
    assert "".join(delta.text for delta in deltas) == tokenizer.decode([65])
    assert isinstance(completion, Completion)
    assert completion.completion_tokens == 2


async def test_output_that_cannot_be_rendered_fails_its_request_alone(run: Run) -> None:
    run.say(PREFILL, 0, [-1], HANDED_OVER)
    assert isinstance(run.live.outcome, InternalFailure)


async def test_a_token_out_of_order_waits_for_those_before_it(run: Run) -> None:
    """And the end, which came before, for all of them."""
    run.live.on_token(DECODE, 7, 0, 2, 67)
    run.say(DECODE, 3, [68], LENGTH)
    run.live.on_token(DECODE, 7, 0, 1, 66)
    assert not run.live.output_ids[0]
    run.live.on_token(PREFILL, 7, 0, 0, 65)
    deltas, completion = await run.events()
    assert [(d.index, [t.token_id for t in d.tokens]) for d in deltas] == [(0, [65, 66, 67, 68])]
    assert isinstance(completion, Completion)
    assert completion.choices == (ChoiceEnd(FinishReason.LENGTH, None),)


async def test_a_token_of_an_attempt_that_is_over_is_stale(run: Run) -> None:
    run.live.on_token(DECODE, 7, 0, 0, 65)
    run.live.on_token(DECODE, 8, 0, 1, 66)
    run.lose(1)
    run.live.on_token(DECODE, 7, 0, 1, 66)
    assert list(run.live.output_ids[0]) == [65]
    assert run.stale_outputs == 2


async def test_log_probabilities_of_a_prompt_come_in_bounded_deltas(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, prompt_logprobs=20)
    run.say(PREFILL, 0, [], prompt_logprobs=scored(500), prompt_index=1)
    run.say(PREFILL, 0, [], prompt_logprobs=scored(3000), prompt_index=1)  # another attempt
    run.say(PREFILL, 0, [65], LENGTH)
    deltas, _ = await run.events()
    assert [len(delta.prompt_logprobs) for delta in deltas] == [500, 1024, 1024, 452, 0]
    assert [one for delta in deltas for one in delta.prompt_logprobs] == list(scored(3000))
