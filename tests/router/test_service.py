"""A real router, real gRPC, scripted workers: what clients and workers see of a request."""

from __future__ import annotations

import asyncio
import sys

import grpc
import pytest
from tokenizers import Tokenizer

from kvrelay.router.doors.incoming_messages import MessageReader
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.v1 import inference_pb2 as pb
from tests.checkpoints import id_of

from .cluster import Cluster, collect, status_of
from .scripted_worker import COUNTED, END, HANDED_OVER, LENGTH, until


async def test_a_request_streams_to_its_end(cluster: Cluster, tokenizer: Tokenizer) -> None:
    cluster.count()
    streamed = await collect(cluster.generate(seed=11))
    assert streamed.token_ids == COUNTED
    assert streamed.text == tokenizer.decode(streamed.token_ids)
    complete = streamed.complete
    assert complete is not None
    assert complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 8)
    assert complete.seed == 11
    timings = complete.timings
    assert (timings.queue_seconds, timings.prefill_seconds) == (1, 2)
    assert (timings.transfer_seconds, timings.decode_seconds) == (3, 4)


async def test_a_text_is_tokenized(cluster: Cluster, tokenizer: Tokenizer) -> None:
    cluster.count()
    await collect(cluster.stub.Generate(pb.GenerateRequest(text="Hello wörld")))
    for worker in (cluster.prefill, cluster.decode):
        assert worker.submits[0].input_ids == tokenizer.encode("Hello wörld").ids


async def test_a_live_request_does_not_keep_its_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    read = MessageReader.generate_request

    def remember(reader: MessageReader, raw: bytes, limits: RequestLimits) -> pb.GenerateRequest:
        seen.append(raw)
        return read(reader, raw, limits)

    monkeypatch.setattr(MessageReader, "generate_request", remember)
    call = cluster.stub.Generate(pb.GenerateRequest(text="Hello"))
    await cluster.decode.submitted()
    await until(lambda: sys.getrefcount(seen[0]) == 2)  # the list's, and the question's own
    call.cancel()


async def test_workers_get_a_complete_submission(cluster: Cluster) -> None:
    cluster.count()
    await collect(
        cluster.generate(request_id="mine", stop=["x"], logit_bias={7: 1.5}, n=2, prompt_logprobs=3)
    )
    prefill, decode = cluster.prefill.submits[0], cluster.decode.submits[0]
    assert prefill.request_id == decode.request_id == "mine"
    assert prefill.attempt == decode.attempt
    assert prefill.sampling_params == decode.sampling_params
    without_default = {"logprobs", "structured_output", "reasoning", "thinking_token_budget"}
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if not field.is_repeated and field.name not in without_default:
            assert prefill.sampling_params.HasField(field.name), field.name
    assert (prefill.num_prompt_tokens, prefill.first_choice) == (3, 0)
    assert (prefill.sampling_params.n, prefill.sampling_params.prompt_logprobs) == (2, 3)
    assert prefill.sampling_params.speculate
    assert 0 < prefill.age_seconds < 5
    assert not prefill.HasField("prefill")
    assert decode.prefill.address == cluster.prefill.endpoint.address
    assert decode.prefill.incarnation == cluster.prefill.incarnation


async def test_many_at_once_do_not_mix(cluster: Cluster) -> None:
    cluster.count()

    async def one(last: int) -> list[int]:
        ids = pb.TokenIds(ids=[last])
        params = pb.SamplingParams(max_tokens=20)
        call = cluster.stub.Generate(pb.GenerateRequest(input_ids=ids, sampling_params=params))
        return (await collect(call)).token_ids

    outputs = await asyncio.gather(*[one(10 * k) for k in range(8)])
    assert outputs == [[10 * k + 1 + n for n in range(20)] for k in range(8)]


async def test_decode_overtakes_prefill(cluster: Cluster) -> None:
    call = cluster.generate()
    prefill, decode = await cluster.prefill.submitted(), await cluster.decode.submitted()
    cluster.decode.say(decode, 1, (51,))
    cluster.decode.say(decode, 2, (52,), end=LENGTH)
    await asyncio.sleep(0.05)
    cluster.prefill.say(prefill, 0, (50,), end=HANDED_OVER)
    assert (await collect(call)).token_ids == [50, 51, 52]


async def test_logprobs_reach_the_client(cluster: Cluster) -> None:
    call = cluster.generate(logprobs=1, max_tokens=1)
    top = [pb.TokenLogprob(token_id=9, logprob=-0.25)]
    logprobs = [pb.TokenLogprobs(token_id=50, logprob=-0.5, top=top)]
    submit = await cluster.prefill.submitted()
    cluster.prefill.say(submit, 0, (50,), logprobs=logprobs, end=LENGTH)
    assert list((await collect(call)).deltas[0].logprobs) == logprobs


async def test_a_request_that_the_first_token_completes(cluster: Cluster) -> None:
    call = cluster.generate()
    submit = await cluster.prefill.submitted()
    end = END(reason=END.REASON_STOP, matched_token_id=400)
    cluster.prefill.say(submit, 0, (400,), end=end)
    streamed = await collect(call)
    assert (streamed.token_ids, streamed.text) == ([400], "")
    assert streamed.complete is not None
    assert streamed.complete.matched_token_id == 400
    await until(lambda: len(cluster.decode.cancels) == 1)
    assert cluster.prefill.cancels == []
    assert await cluster.metric("kvrelay_stale_outputs_total") == 0


async def test_a_stop_string_across_tokens_is_not_shown(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    letters = [id_of(tokenizer, letter) for letter in "xab"]
    call = cluster.generate(stop=["ab"])
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (letters[0],), end=HANDED_OVER)
    submit = await cluster.decode.submitted()
    cluster.decode.say(submit, 1, (letters[1],))
    end = END(reason=END.REASON_STOP, matched_stop_string="ab")
    cluster.decode.say(submit, 2, (letters[2],), end=end)
    streamed = await collect(call)
    # The two workers' tokens may come in either order, and then in one delta.
    assert [delta.text for delta in streamed.deltas if delta.text] == ["x"]
    assert streamed.token_ids == letters
    assert streamed.complete is not None
    assert streamed.complete.matched_stop_string == "ab"
    assert streamed.complete.finish_reason == pb.FINISH_REASON_STOP


async def test_abort_completes_the_stream(cluster: Cluster) -> None:
    call = cluster.generate(request_id="ab")
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (50,))
    assert (await call.read()).delta.token_ids == [50]
    assert not (await cluster.stub.Abort(pb.AbortRequest(request_id="a"))).aborted
    assert (await cluster.stub.Abort(pb.AbortRequest(request_id="ab"))).aborted
    assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_ABORT
    await until(lambda: len(cluster.prefill.cancels) == len(cluster.decode.cancels) == 1)
    assert not (await cluster.stub.Abort(pb.AbortRequest(request_id="ab"))).aborted
    assert await cluster.metric("kvrelay_stale_outputs_total") == 0


async def test_a_client_that_goes_away_cancels_on_both(cluster: Cluster) -> None:
    call = cluster.generate(request_id="gone")
    await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
    call.cancel()
    await until(lambda: len(cluster.prefill.cancels) == len(cluster.decode.cancels) == 1)
    assert cluster.prefill.cancels[0].request_id == "gone"
    assert cluster.prefill.cancels[0].attempt == cluster.prefill.submits[0].attempt
    assert (await cluster.server_info()).live_requests == 0


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_lost_worker_that_nobody_replaces_is_unavailable_and_the_other_is_told(
    cluster: Cluster, lost: str
) -> None:
    dying, other = cluster.prefill, cluster.decode
    if lost == "decode":
        dying, other = other, dying
    call = cluster.generate()
    await asyncio.gather(dying.submitted(), other.submitted())
    await dying.stop()
    error = await status_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert f"worker {dying.name} was lost" in str(error.details())
    assert f"no {lost} worker" in str(error.details())
    await until(lambda: len(other.cancels) == 1)


async def test_prefill_may_be_lost_after_the_hand_over(cluster: Cluster) -> None:
    call = cluster.generate()
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (50,), end=HANDED_OVER)
    assert (await call.read()).delta.token_ids == [50]
    await cluster.prefill.stop()
    cluster.decode.say(await cluster.decode.submitted(), 1, (51,), end=LENGTH)
    assert (await call.read()).delta.token_ids == [51]


async def test_a_failure_for_good_is_internal_and_names_the_error(cluster: Cluster) -> None:
    call = cluster.generate()
    end = END(reason=END.REASON_FAILED, error="pull: broken")
    cluster.decode.say(await cluster.decode.submitted(), end=end)
    error = await status_of(call)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details() == "decode-0: pull: broken"
    await until(lambda: len(cluster.prefill.cancels) == 1)


async def test_a_stopping_router_gives_every_request_a_status(cluster: Cluster) -> None:
    call = cluster.generate()
    await cluster.decode.submitted()
    _, error = await asyncio.gather(cluster.router.stop(), status_of(call))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "stopping" in str(error.details())
