"""However often a stream begins again, and however it is cut, each event is delivered once."""

from __future__ import annotations

import random

import pytest

from kvrelay.client.answer import Answer
from kvrelay.client.errors import Diverged
from kvrelay.client.resumption import Resumption
from kvrelay.v1 import inference_pb2 as pb

from .scripted import COMPLETE, WORDS, deltas

PROMPT = [pb.TokenLogprobs(token_id=n, logprob=-n) for n in range(9)]


def scores(first: int, last: int) -> list[pb.TokenLogprobs]:
    return [pb.TokenLogprobs(token_id=n, logprob=-n / 7) for n in range(first, last)]


def stream(rng: random.Random, choices: int, length: int) -> list[pb.GenerateResponse]:
    """The same outputs each time, cut at random; some text is held back for a while."""
    events = []
    cut = rng.randint(0, len(PROMPT))
    events += [pb.GenerateDelta(prompt_logprobs=part) for part in (PROMPT[:cut], PROMPT[cut:])]
    sent, said = [0] * choices, [0] * choices
    while any(count < length for count in sent):
        choice = rng.choice([one for one in range(choices) if sent[one] < length])
        first = sent[choice]
        sent[choice] = min(first + rng.randint(0, 4), length)
        text = "".join(f"{choice}.{n} " for n in range(sent[choice]))
        end = len(text) if sent[choice] == length else rng.randint(said[choice], len(text))
        events.append(
            pb.GenerateDelta(
                index=first,
                token_ids=range(first, sent[choice]),
                text=text[said[choice] : end],
                logprobs=scores(first, sent[choice]),
                choice=choice,
            )
        )
        said[choice] = end
    responses = [pb.GenerateResponse(request_id="r", delta=delta) for delta in events]
    return [*responses, pb.GenerateResponse(request_id="r", complete=COMPLETE)]


@pytest.mark.parametrize("seed", range(20))
def test_streams_that_break_anywhere_make_one_answer(seed: int) -> None:
    rng, answer, whole = random.Random(seed), Answer(), Answer()
    for response in stream(rng, 3, 30):
        whole.take(response)
    resumption = Resumption()
    for attempt in range(5):
        resumption.begin()
        events = stream(rng, 3, 30)
        for response in events if attempt == 4 else events[: rng.randrange(len(events))]:
            event = resumption.take(response)
            if event is not None:
                answer.take(event)
    assert answer == whole
    assert [output.token_ids for output in answer.outputs] == [list(range(30))] * 3
    assert answer.outputs[1].text == "".join(f"1.{n} " for n in range(30))
    assert answer.prompt_logprobs == PROMPT


def test_what_was_delivered_is_cut_off_a_delta_and_its_index_moves_on() -> None:
    resumption = Resumption()
    resumption.begin()
    for delta in deltas(0, 3):
        assert resumption.take(pb.GenerateResponse(delta=delta)) is not None
    resumption.begin()
    first, second = deltas(0, 6, size=2), deltas(0, 6, size=4)[0]
    assert resumption.take(pb.GenerateResponse(delta=first[0])) is None
    resumption.begin()
    event = resumption.take(pb.GenerateResponse(delta=second))
    assert event is not None
    assert (event.delta.index, list(event.delta.token_ids)) == (3, [103])
    assert event.delta.text == WORDS[3]


def test_other_tokens_than_before_are_no_continuation() -> None:
    resumption = Resumption()
    resumption.begin()
    for delta in deltas(0, 3):
        resumption.take(pb.GenerateResponse(delta=delta))
    resumption.begin()
    other = pb.GenerateDelta(index=0, token_ids=[100, 7, 102, 103], text="The slow")
    with pytest.raises(Diverged, match=r"other tokens from 0 on .*--seed-key-file"):
        resumption.take(pb.GenerateResponse(delta=other))


def test_a_gap_is_no_continuation() -> None:
    resumption = Resumption()
    resumption.begin()
    with pytest.raises(Diverged, match="token 2 came after 0 tokens"):
        resumption.take(pb.GenerateResponse(delta=deltas(2, 3)[0]))
