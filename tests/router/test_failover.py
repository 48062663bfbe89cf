"""A stream goes on after its worker was lost."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect, read, running
from .scripted_worker import (
    COUNTED,
    HANDED_OVER,
    LENGTH,
    SECONDS,
    count_decode,
    tokens_then_silence,
    until,
)


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_decode_worker_lost_in_mid_stream_is_not_noticed(
    config: RouterConfig, choices: int
) -> None:
    """smg#2382, NVIDIA/TensorRT-LLM#17206."""
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        cluster.decode.on_submit = tokens_then_silence
        call = cluster.generate(n=choices)
        streamed = await read(call, 3 * choices)
        await cluster.decode.stop()
        streamed += await read(call)
    for choice in range(choices):
        first = 4 + 50 * choice
        assert [t for c, t in streamed if c == choice] == list(range(first, first + 8))
    assert [len(worker.submits) for worker in cluster.workers] == [1 + choices, 1, choices]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_prefill_worker_lost_before_the_hand_over_is_not_noticed(
    config: RouterConfig, choices: int
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        cluster.prefill.on_submit = None
        cluster.decode.on_submit = None
        call = cluster.generate(n=choices)
        old = await cluster.decode.submitted()
        await cluster.prefill.submitted()
        cluster.decode.on_submit = count_decode
        await cluster.prefill.stop()
        streamed = await collect(call)
        for choice in range(choices):
            first = 4 + 50 * choice
            assert streamed.token_ids_of(choice) == list(range(first, first + 8))
        # Nothing had come, so all choices go on together; and the decode side was told.
        assert cluster.decode.submits[1].sampling_params.n == choices
        assert [cancel.attempt for cancel in cluster.decode.cancels] == [old.attempt]


async def test_what_overtook_a_lost_first_token_is_computed_again(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        cluster.prefill.on_submit = None
        cluster.decode.on_submit = None
        call = cluster.generate()
        old = await cluster.decode.submitted()
        cluster.decode.say(old, 1, (99,), end=LENGTH)
        cluster.decode.on_submit = count_decode
        await cluster.prefill.submitted()
        await cluster.prefill.stop()
        assert (await collect(call)).token_ids == COUNTED


async def test_a_restarted_worker_is_waited_for(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = tokens_then_silence
        call = cluster.generate()
        streamed = await read(call, 3)
        await cluster.decode.stop()
        await asyncio.sleep(0.3)
        cluster.decode.incarnation = "decode-0-2"
        cluster.decode.on_submit = count_decode
        await cluster.decode.start()
        cluster.list_workers()
        streamed += await read(call)
        assert [token for _, token in streamed] == COUNTED
        assert await cluster.resubmitted("worker_lost") == 1


async def test_an_abort_during_that_wait_is_the_end(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        call = cluster.generate(request_id="ab")
        await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
        await cluster.decode.stop()
        await until(lambda: len(cluster.prefill.cancels) == 1)
        await asyncio.sleep(0.1)
        assert (await cluster.stub.Abort(pb.AbortRequest(request_id="ab"))).aborted
        assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_ABORT
        await cluster.decode.start()
        await asyncio.wait_for(cluster.router.wait_ready(), SECONDS)
        await asyncio.sleep(0.1)
        assert len(cluster.prefill.submits) == len(cluster.decode.submits) == 1


async def test_output_that_was_complete_is_not_submitted_again(cluster: Cluster) -> None:
    call = cluster.generate(max_tokens=3)
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (4,), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(), 1, (5, 6))
    await read(call, 3)
    await cluster.decode.stop()
    assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(cluster.prefill.submits) == 1


async def test_each_request_is_counted_once_though_a_worker_is_lost(config: RouterConfig) -> None:
    """smg#1781, imp#1120."""
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        cluster.prefill.on_submit = None
        calls = [cluster.generate() for _ in range(6)]
        collecting = [asyncio.create_task(collect(call)) for call in calls]
        await cluster.prefill.submitted()
        await until(lambda: len(cluster.decode.submits) == len(calls))
        await cluster.prefill.stop()
        assert [len(one.token_ids) for one in await asyncio.gather(*collecting)] == [8] * 6
        for name in ("requests_total", "ttft_seconds_count", "e2e_seconds_count"):
            assert await cluster.metric(f"kvrelay_{name}") == len(calls), name
        # Tokens that come together have one gap before them.
        assert len(calls) <= await cluster.metric("kvrelay_itl_seconds_count") <= len(calls) * 7
        assert await cluster.resubmitted() >= 1
        assert (await cluster.server_info()).live_requests == 0
