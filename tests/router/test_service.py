"""A real router, real gRPC, scripted workers: what clients and workers see."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.incoming import MessageReader
from kvrelay.router.limits import Limits
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from tests.checkpoints import id_of

from .cluster import Cluster, collect, running, status_of
from .scripted_worker import END, load, until

HANDED_OVER = END(reason=END.REASON_HANDED_OVER)
LENGTH = END(reason=END.REASON_LENGTH)


async def test_a_request_streams_to_its_end(cluster: Cluster, tokenizer: Tokenizer) -> None:
    cluster.count()
    streamed = await collect(cluster.generate(seed=11))
    assert streamed.token_ids == [4, 5, 6, 7, 8, 9, 10, 11]
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

    def remember(reader: MessageReader, raw: bytes, limits: Limits) -> pb.GenerateRequest:
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
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if not field.is_repeated and field.name != "logprobs":
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


# The same id again.


async def test_a_retry_attaches_and_sees_everything(cluster: Cluster) -> None:
    first = cluster.generate(request_id="same")
    prefill, decode = await cluster.prefill.submitted(), await cluster.decode.submitted()
    cluster.prefill.say(prefill, 0, (50,), end=HANDED_OVER)
    assert (await first.read()).delta.token_ids == [50]
    second = cluster.generate(request_id="same")
    assert (await second.read()).delta.token_ids == [50]
    first.cancel()
    await asyncio.sleep(0.05)
    cluster.decode.say(decode, 1, (51,), end=LENGTH)
    assert (await second.read()).delta.token_ids == [51]
    assert (await second.read()).HasField("complete")
    assert len(cluster.prefill.submits) == len(cluster.decode.submits) == 1


async def test_another_body_under_a_live_id_is_refused(cluster: Cluster) -> None:
    first = cluster.generate(request_id="same")
    await cluster.decode.submitted()
    error = await status_of(cluster.generate(request_id="same", temperature=0.5))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "request_id" in str(error.details())
    first.cancel()


async def test_an_id_can_be_used_again_while_workers_still_release_it(cluster: Cluster) -> None:
    first = cluster.generate(request_id="again")
    old = await cluster.prefill.submitted()
    cluster.prefill.say(old, 0, (50,), end=LENGTH)
    await collect(first)
    second = cluster.generate(request_id="again")
    new = await cluster.prefill.submitted(2)
    assert new.attempt > old.attempt
    cluster.prefill.say(new, 0, (60,), end=LENGTH)
    assert (await collect(second)).token_ids == [60]


# Ways to end early.


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
    assert (await server_info(cluster)).live_requests == 0


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


# Refusals.


async def test_a_bad_field_is_named_before_any_worker_hears_of_it(cluster: Cluster) -> None:
    error = await status_of(cluster.generate(top_p=float("nan")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("top_p: ")
    assert cluster.prefill.submits == cluster.decode.submits == []
    refused = 'kvrelay_requests_total{model="counter",outcome="invalid"}'
    assert await cluster.metric(refused) == 1


async def test_an_oversized_message_is_refused(cluster: Cluster) -> None:
    error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="x" * (65 << 10))))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("text: ")
    error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="x" * (200 << 10))))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_overload_says_when_to_come_again(cluster: Cluster) -> None:
    calls = [cluster.generate() for _ in range(8)]
    await cluster.decode.submitted(8)
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after-ms", "500") in list(error.trailing_metadata())
    calls[0].cancel()
    await until(lambda: len(cluster.decode.cancels) == 1)
    calls[0] = cluster.generate()
    await cluster.decode.submitted(9)
    for call in calls:
        call.cancel()


async def test_requests_count_as_live_while_they_are_validated(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text costs nothing where there is no room, and nobody else waits for it."""
    texts: list[str] = []
    let_go = threading.Event()

    def hold(tokenizer: Tokenizer, text: str, most_tokens: int) -> Sequence[int]:
        texts.append(text)
        assert let_go.wait(10)
        return [1, 2, 3]

    monkeypatch.setattr("kvrelay.router.service.encode", hold)
    config = dataclasses.replace(config, max_live_requests=2)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        calls = [cluster.stub.Generate(pb.GenerateRequest(text=f"no. {i}")) for i in range(2)]
        reads = [asyncio.create_task(collect(call)) for call in calls]
        await until(lambda: len(texts) == 2)
        error = await status_of(cluster.stub.Generate(pb.GenerateRequest(text="no. 3")))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-live-requests" in str(error.details())
        let_go.set()
        assert all(len(streamed.token_ids) == 16 for streamed in await asyncio.gather(*reads))
        assert sorted(texts) == ["no. 0", "no. 1"]


async def test_a_text_that_joins_a_live_request_is_not_tokenized_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = pb.GenerateRequest(request_id="shared", text="Hello world")
    first = cluster.stub.Generate(message)
    submit = await cluster.prefill.submitted()
    monkeypatch.setattr("kvrelay.router.validation.Validator.validate", None)
    second = cluster.stub.Generate(message)
    other = cluster.stub.Generate(pb.GenerateRequest(request_id="shared", text="Hello"))
    assert (await status_of(other)).code() == grpc.StatusCode.ALREADY_EXISTS
    reads = [asyncio.create_task(collect(call)) for call in (first, second)]
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert [streamed.token_ids for streamed in await asyncio.gather(*reads)] == [[50], [50]]


async def test_without_a_ready_worker_it_is_unavailable(cluster: Cluster) -> None:
    await cluster.decode.stop()
    await until_status(cluster, health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    cluster.discovery.replace([cluster.prefill.endpoint])
    error = await status_of(cluster.generate())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "decode" in str(error.details())


# Workers come and go.


async def test_a_broken_stream_is_taken_up_again(cluster: Cluster) -> None:
    cluster.decode.break_stream()
    await until(lambda: len(cluster.decode.hellos) == 2)
    await asyncio.wait_for(cluster.router.wait_ready(), 5)
    cluster.count()
    assert len((await collect(cluster.generate())).token_ids) == 8
    assert len({hello.router for hello in cluster.decode.hellos}) == 1


async def test_another_incarnation_is_attached_only_once_it_is_listed(cluster: Cluster) -> None:
    await cluster.decode.stop()
    cluster.decode.incarnation = "decode-0-2"
    await cluster.decode.start()
    await until(lambda: len(cluster.decode.hellos) >= 2)
    assert cluster.decode.hellos[-1].incarnation == "decode-0-1"
    assert (await status_of(cluster.generate())).code() == grpc.StatusCode.UNAVAILABLE
    cluster.discovery.replace([cluster.prefill.endpoint, cluster.decode.endpoint])
    await asyncio.wait_for(cluster.router.wait_ready(), 5)
    cluster.count()
    assert len((await collect(cluster.generate())).token_ids) == 8


async def test_a_worker_off_the_list_is_let_go_of(cluster: Cluster) -> None:
    call = cluster.generate()
    await asyncio.gather(cluster.decode.submitted(), cluster.prefill.submitted())
    cluster.discovery.replace([cluster.prefill.endpoint])
    assert (await status_of(call)).code() == grpc.StatusCode.UNAVAILABLE
    await until(lambda: len(cluster.prefill.cancels) == 1)
    await asyncio.sleep(0.3)
    assert len(cluster.decode.hellos) == 1


async def test_outputs_of_no_attempt_are_dropped_and_counted(cluster: Cluster) -> None:
    call = cluster.generate(request_id="now")
    submit = await cluster.prefill.submitted()
    old = worker_pb2.CancelRequest(request_id="now", attempt=submit.attempt + 1)
    cluster.prefill.say(old, 0, (99,))
    cluster.prefill.say(worker_pb2.CancelRequest(request_id="no", attempt=1), 0, (99,))
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert (await collect(call)).token_ids == [50]
    assert await cluster.metric("kvrelay_stale_outputs_total") == 2


# The other calls.


async def server_info(cluster: Cluster) -> pb.GetServerInfoResponse:
    info: pb.GetServerInfoResponse = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest())
    return info


async def test_loads_are_the_workers_own(cluster: Cluster) -> None:
    reported = load(waiting_tokens=9, free=60)
    reported.growth_tokens, reported.speeds.seconds_per_step = 77, 0.25
    cluster.decode.send(worker_pb2.AttachResponse(load=reported))
    cluster.prefill.send(worker_pb2.AttachResponse(load=load(free=10)))
    await asyncio.sleep(0.1)
    decode, prefill = (await cluster.stub.GetLoads(pb.GetLoadsRequest())).workers
    assert (decode.worker, decode.role) == ("decode-0", pb.WORKER_ROLE_DECODE)
    assert decode.load == reported
    assert decode.ready
    assert prefill.load.pools[0].free == 10
    assert (await server_info(cluster)).workers[0] == decode


async def test_model_info(cluster: Cluster) -> None:
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.architecture, info.dtype) == ("counter", "Counting", "float32")
    assert (info.vocab_size, info.max_model_len) == (402, 512)
    assert info.eos_token_ids == [400]


async def test_tokenize_and_back(
    cluster: Cluster, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("incoming", "service"):
        monkeypatch.setattr(f"kvrelay.router.{user}.MAX_TEXT_TOKENS", 512)
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(text="日本 😀"))).input_ids
    assert ids == tokenizer.encode("日本 😀").ids
    with pytest.raises(grpc.aio.AioRpcError, match=r"text: has 600 tokens; the router takes 512"):
        await cluster.stub.Tokenize(pb.TokenizeRequest(text="@" * 600))
    with pytest.raises(grpc.aio.AioRpcError, match=r"input_ids: has 513 tokens or more"):
        await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=[1] * 513))
    back = await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=ids))
    assert back.text == "日本 😀"
    with pytest.raises(grpc.aio.AioRpcError, match="input_ids: token id 402"):
        await cluster.stub.Detokenize(pb.DetokenizeRequest(input_ids=[402]))


async def until_status(cluster: Cluster, wanted: Any) -> None:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    async with asyncio.timeout(5):
        for service in ("", "kvrelay.v1.InferenceService"):
            while True:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                if answer.status == wanted:
                    break
                await asyncio.sleep(0.01)


async def test_health_follows_readiness(cluster: Cluster) -> None:
    statuses = health_pb2.HealthCheckResponse
    await until_status(cluster, statuses.SERVING)
    await cluster.prefill.stop()
    await until_status(cluster, statuses.NOT_SERVING)
    await cluster.prefill.start()
    await until_status(cluster, statuses.SERVING)


async def test_reflection_lists_the_service(cluster: Cluster) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    names = [service.name for service in answer.list_services_response.service]
    assert "kvrelay.v1.InferenceService" in names


async def test_metrics_tell_what_happened(cluster: Cluster) -> None:
    cluster.count()
    streamed = await collect(cluster.generate())
    model = '{model="counter"}'
    assert await cluster.metric(f"kvrelay_ttft_seconds_count{model}") == 1
    assert await cluster.metric(f"kvrelay_itl_seconds_count{model}") == len(streamed.deltas) - 1
    assert await cluster.metric(f"kvrelay_e2e_seconds_count{model}") == 1
    assert await cluster.metric(f"kvrelay_prompt_tokens_total{model}") == 3
    assert await cluster.metric(f"kvrelay_output_tokens_total{model}") == 8
    ended = 'kvrelay_requests_total{model="counter",outcome="length"}'
    assert await cluster.metric(ended) == 1
    waiting = 'kvrelay_requests_live{model="counter",state="waiting"}'
    assert await cluster.metric(waiting) == 0
    cluster.prefill.on_submit = None
    call = cluster.generate()
    await cluster.prefill.submitted(2)
    assert await cluster.metric(waiting) == 1
    call.cancel()


# The process.


@pytest.mark.parametrize("listener", ["grpc_address", "metrics_address"])
async def test_a_port_in_use_is_one_clear_line(
    cluster: Cluster, config: RouterConfig, listener: str
) -> None:
    taken = getattr(cluster.router, listener)
    second = Router(dataclasses.replace(config, **{listener: taken}), StaticDiscovery())
    with pytest.raises(StartError, match=taken) as caught:
        await second.start()
    assert "\n" not in str(caught.value)


async def test_a_missing_tokenizer_is_one_clear_line(config: RouterConfig, tmp_path: Path) -> None:
    router = Router(dataclasses.replace(config, model_path=tmp_path), StaticDiscovery())
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        await router.start()


async def test_ports_are_free_again_after_a_stop(config: RouterConfig) -> None:
    first = Router(config, StaticDiscovery())
    await first.start()
    await first.stop()
    same = dataclasses.replace(
        config, grpc_address=first.grpc_address, metrics_address=first.metrics_address
    )
    second = Router(same, StaticDiscovery())
    await second.start()
    await second.stop()


@pytest.mark.alone
async def test_an_idle_router_does_not_work(cluster: Cluster) -> None:
    cluster.count()
    await collect(cluster.generate())
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(1.5)
    assert time.process_time() - before < 0.03
