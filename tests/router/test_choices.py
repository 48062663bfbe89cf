"""Several outputs of one prompt come in one stream."""

from __future__ import annotations

import pytest

from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect
from .scripted_worker import END, HANDED_OVER, LENGTH, until


async def test_every_choice_is_an_output_of_its_own(cluster: Cluster) -> None:
    cluster.count()
    streamed = await collect(cluster.generate(n=3, max_tokens=5))
    for choice in range(3):
        first = 4 + 50 * choice
        assert streamed.token_ids_of(choice) == list(range(first, first + 5))
    complete = streamed.complete
    assert complete is not None
    assert [end.finish_reason for end in complete.choices] == [pb.FINISH_REASON_LENGTH] * 3
    assert complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 15)
    assert len(cluster.prefill.submits) == len(cluster.decode.submits) == 1
    assert cluster.prefill.cancels == cluster.decode.cancels == []


async def test_one_output_has_one_choice(cluster: Cluster) -> None:
    cluster.count()
    complete = (await collect(cluster.generate())).complete
    assert complete is not None
    assert [end.finish_reason for end in complete.choices] == [pb.FINISH_REASON_LENGTH]


async def test_choices_end_each_in_its_own_way(cluster: Cluster) -> None:
    call = cluster.generate(n=3, stop=["stop"])
    submit = await cluster.prefill.submitted()
    stop = END(reason=END.REASON_STOP, matched_token_id=400)
    cluster.prefill.say(submit, 0, (400,), choice=0, end=stop)
    for choice in (1, 2):
        cluster.prefill.say(submit, 0, (60 + choice,), choice=choice, end=HANDED_OVER)
    submit = await cluster.decode.submitted()
    cluster.decode.say(submit, 1, (71,), choice=1, end=LENGTH)
    string = END(reason=END.REASON_STOP, matched_stop_string="stop")
    cluster.decode.say(submit, 1, (72,), choice=2, end=string)
    streamed = await collect(call)
    assert [streamed.token_ids_of(choice) for choice in range(3)] == [[400], [61, 71], [62, 72]]
    complete = streamed.complete
    assert complete is not None
    assert complete.matched_token_id == complete.choices[0].matched_token_id == 400
    assert complete.choices[1] == pb.ChoiceEnd(finish_reason=pb.FINISH_REASON_LENGTH)
    assert complete.choices[2].matched_stop_string == "stop"
    assert complete.usage.completion_tokens == 5


async def test_an_abort_ends_all_that_have_not_ended(cluster: Cluster) -> None:
    call = cluster.generate(request_id="ab", n=2)
    submit = await cluster.prefill.submitted()
    cluster.prefill.say(submit, 0, (50,), choice=0, end=LENGTH)
    cluster.prefill.say(submit, 0, (60,), choice=1, end=HANDED_OVER)
    await call.read()
    await call.read()
    await cluster.stub.Abort(pb.AbortRequest(request_id="ab"))
    complete = (await call.read()).complete
    assert [end.finish_reason for end in complete.choices] == [
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_ABORT,
    ]
    await until(lambda: len(cluster.decode.cancels) == 1)
    assert cluster.prefill.cancels == []
    aborted = 'kvrelay_requests_total{model="counter",outcome="abort"}'
    assert await cluster.metric(aborted) == 1


@pytest.mark.parametrize("with_token", [True, False])
async def test_prompt_logprobs_come_before_the_first_token(
    cluster: Cluster, with_token: bool
) -> None:
    call = cluster.generate(n=2, prompt_logprobs=1, max_tokens=2)
    top = [pb.TokenLogprob(token_id=9, logprob=-0.25)]
    logprobs = [pb.TokenLogprobs(token_id=t, logprob=-0.5, top=top) for t in (2, 3)]
    submit = await cluster.prefill.submitted()
    if not with_token:
        cluster.prefill.say(submit, 0, prompt_logprobs=logprobs, prompt_index=1)
    early = logprobs if with_token else []
    cluster.prefill.say(submit, 0, (50,), end=HANDED_OVER, prompt_logprobs=early, prompt_index=1)
    cluster.prefill.say(submit, 0, (60,), choice=1, end=HANDED_OVER)
    submit = await cluster.decode.submitted()
    for choice in range(2):
        cluster.decode.say(submit, 1, (51,), choice=choice, end=LENGTH)
    streamed = await collect(call)
    assert list(streamed.deltas[0].prompt_logprobs) == logprobs
    assert not any(delta.prompt_logprobs for delta in streamed.deltas[1:])


async def test_the_first_token_of_any_choice_is_the_requests(cluster: Cluster) -> None:
    call = cluster.generate(n=2)
    submit = await cluster.prefill.submitted()
    model = '{model="counter"}'
    cluster.prefill.say(submit, 0, (60,), choice=1, end=HANDED_OVER)
    await call.read()
    assert await cluster.metric(f"kvrelay_ttft_seconds_count{model}") == 1
    cluster.prefill.say(submit, 0, (50,), choice=0, end=HANDED_OVER)
    await call.read()
    assert await cluster.metric(f"kvrelay_ttft_seconds_count{model}") == 1
    assert await cluster.metric(f"kvrelay_itl_seconds_count{model}") == 0
    cluster.decode.say(await cluster.decode.submitted(), 1, (61,), choice=1)
    await call.read()
    assert await cluster.metric(f"kvrelay_itl_seconds_count{model}") == 1
    call.cancel()
