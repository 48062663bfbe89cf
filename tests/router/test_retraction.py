"""A stream goes on after its memory was taken."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect
from .scripted_worker import (
    COUNTED,
    END,
    HANDED_OVER,
    LENGTH,
    RETRACTED,
    broken,
    emitted_by,
    retract_after,
)


async def stale(cluster: Cluster) -> float:
    return await cluster.metric('kvrelay_stale_outputs_total{model="counter"}')


async def test_a_retracted_stream_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(3)
    streamed = await collect(
        cluster.generate(seed=11, temperature=0.5, stop=["never"], min_tokens=2, logprobs=1)
    )
    assert streamed.token_ids == COUNTED
    assert streamed.complete is not None
    assert streamed.complete.finish_reason == pb.FINISH_REASON_LENGTH
    usage = streamed.complete.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)
    for worker in (cluster.prefill, cluster.decode):
        first, second = worker.submits
        assert second.attempt > first.attempt
        assert list(second.input_ids) == [1, 2, 3, 4, 5, 6, 7]
        assert (second.num_prompt_tokens, second.first_choice) == (3, 0)
        assert second.sampling_params == first.sampling_params
        assert second.age_seconds > first.age_seconds
        assert worker.cancels == []
    assert cluster.decode.submits[1].prefill == cluster.decode.submits[0].prefill
    assert await cluster.resubmitted("retracted") == 1
    assert await stale(cluster) == 0


async def test_retractions_in_a_row_use_up_no_attempts(cluster: Cluster) -> None:
    cluster.count()
    # More than `max_attempts`, and some before the attempt said anything new but the first token.
    cluster.decode.on_submit = retract_after(1, 0, 0, 1, 0)
    assert (await collect(cluster.generate())).token_ids == COUNTED
    # The prefill worker completes the last attempt: the decode worker may hear of it later.
    await cluster.decode.submitted(6)
    emitted = [len(emitted_by(submit)) for submit in cluster.decode.submits]
    assert emitted == [0, 2, 3, 4, 6, 7]
    assert await cluster.resubmitted() == await cluster.resubmitted("retracted") == 5


async def test_one_of_three_choices_is_retracted(cluster: Cluster) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(2, choice=1)
    streamed = await collect(cluster.generate(n=3, prompt_logprobs=0))
    for choice in range(3):
        first = 4 + 50 * choice
        assert streamed.token_ids_of(choice) == list(range(first, first + 8))
    _, second = cluster.decode.submits
    assert (second.first_choice, second.sampling_params.n) == (1, 1)
    assert emitted_by(second) == [54, 55, 56]
    assert streamed.complete is not None
    assert streamed.complete.usage.completion_tokens == 24


async def test_prompt_logprobs_are_asked_for_until_they_are_here(cluster: Cluster) -> None:
    call = cluster.generate(prompt_logprobs=2, max_tokens=4)
    first = await cluster.prefill.submitted()
    logprobs = [pb.TokenLogprobs(token_id=t, logprob=-0.5) for t in (2, 3)]
    cluster.prefill.say(first, prompt_logprobs=logprobs[:1], prompt_index=1)
    cluster.prefill.say(first, end=broken())
    second = await cluster.prefill.submitted(2)
    assert second.sampling_params.prompt_logprobs == 2
    cluster.prefill.say(second, prompt_logprobs=logprobs, prompt_index=1)
    cluster.prefill.say(second, 0, (4,), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(2), 1, end=RETRACTED)
    third = await cluster.prefill.submitted(3)
    assert not third.sampling_params.HasField("prompt_logprobs")
    cluster.prefill.say(third, 1, (5,), end=LENGTH)
    streamed = await collect(call)
    assert [list(delta.prompt_logprobs) for delta in streamed.deltas] == [
        logprobs[:1],
        logprobs[1:],
        [],
        [],
    ]


async def test_cached_tokens_are_those_of_the_first_attempt(cluster: Cluster) -> None:
    call = cluster.generate()
    prefill = await cluster.prefill.submitted()
    cluster.prefill.say(prefill, 0, (4,), end=HANDED_OVER, cached_tokens=1)
    cluster.decode.say(await cluster.decode.submitted(), 1, end=RETRACTED)
    prefill = await cluster.prefill.submitted(2)
    cluster.prefill.say(prefill, 1, (5,), end=LENGTH, cached_tokens=3)
    complete = (await collect(call)).complete
    assert complete is not None
    assert complete.usage.cached_tokens == 1


@pytest.mark.parametrize("choices", [1, 2])
async def test_late_output_of_an_old_attempt_is_dropped_and_counted(
    cluster: Cluster, choices: int
) -> None:
    """The attempt is over, or goes on with another choice."""
    call = cluster.generate(n=choices)
    prefill, decode = await cluster.prefill.submitted(), await cluster.decode.submitted()
    for choice in range(choices):
        cluster.prefill.say(prefill, 0, (4,), choice=choice, end=HANDED_OVER)
    cluster.decode.say(decode, 1, end=RETRACTED)
    cluster.decode.say_late(decode, 1, (99,))
    cluster.decode.say_late(decode, 2, (98,), end=LENGTH)
    await cluster.prefill.submitted(2)
    cluster.prefill.say(cluster.prefill.submits[1], 1, (5,), end=LENGTH)
    for choice in range(1, choices):
        cluster.decode.say(decode, 1, (55,), choice=choice, end=LENGTH)
    streamed = await collect(call)
    assert streamed.token_ids == [4, 5]
    assert await stale(cluster) == 2


async def test_a_token_that_was_streamed_stays_whatever_a_later_attempt_says(
    cluster: Cluster,
) -> None:
    call = cluster.generate()
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (4,), end=HANDED_OVER)
    decode = await cluster.decode.submitted()
    cluster.decode.say(decode, 1, (5, 6))
    cluster.decode.say(decode, 3, end=RETRACTED)
    again = await cluster.prefill.submitted(2)
    cluster.prefill.say(again, 1, (99, 6, 7), end=LENGTH)
    assert (await collect(call)).token_ids == [4, 5, 6, 7]
    assert await cluster.metric('kvrelay_contradicted_tokens_total{model="counter"}') == 1


async def test_text_goes_on_across_attempts(cluster: Cluster) -> None:
    """A stop string and a character whose parts come from two attempts."""
    call = cluster.generate(stop=["ab"], max_tokens=50)
    tokenize = cluster.stub.Tokenize
    ids = [(await tokenize(pb.TokenizeRequest(text=x))).input_ids[0] for x in ("x", "a", "b")]
    face = list((await tokenize(pb.TokenizeRequest(text="🦄"))).input_ids)
    cluster.prefill.say(await cluster.prefill.submitted(), 0, tuple(face[:-1]), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(), len(face) - 1, end=RETRACTED)
    again = await cluster.prefill.submitted(2)
    cluster.prefill.say(again, len(face) - 1, (face[-1], ids[0], ids[1]), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(2), len(face) + 2, end=RETRACTED)
    again = await cluster.prefill.submitted(3)
    end = END(reason=END.REASON_STOP, matched_stop_string="ab")
    cluster.prefill.say(again, len(face) + 2, (ids[2],), end=end)
    streamed = await collect(call)
    assert streamed.text == "🦄x"
    assert streamed.token_ids == [*face, *ids]


async def test_many_requests_survive_a_worker_that_retracts_again_and_again(
    cluster: Cluster,
) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(*[3, 0, 1] * 7)
    streams = await asyncio.gather(*(collect(cluster.generate(max_tokens=20)) for _ in range(8)))
    assert all(streamed.token_ids == list(range(4, 24)) for streamed in streams)
    assert await cluster.resubmitted("retracted") == 21
