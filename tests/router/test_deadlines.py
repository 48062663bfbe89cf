"""Requests whose deadline is too near for a first token, on a real router."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import grpc
import pytest

from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.page_hash import PageHashes

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import COUNTED, END, ScriptedWorker, load, until


def prompt(tokens: int) -> list[int]:
    return [*range(10, 10 + tokens - 3), 1, 2, 3]


def generate(cluster: Cluster, timeout: float | None, *, tokens: int = 3, **fields: Any) -> Any:
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=prompt(tokens)),
        sampling_params=pb.SamplingParams(max_tokens=8),
        **fields,
    )
    return cluster.stub.Generate(request, timeout=timeout)


async def report(cluster: Cluster, worker: ScriptedWorker, **fields: Any) -> None:
    """The worker says what it has to do, at a second for each token, and the router has heard."""
    reported = load()
    reported.MergeFrom(pb.WorkerLoad(**fields))
    if "speeds" not in fields:
        speeds = pb.StepSpeeds(seconds_per_token=1, chunk_tokens=512, prompts_known=True)
        reported.speeds.CopyFrom(speeds)
    await cluster.report(worker, reported)


async def ended(cluster: Cluster, outcome: str) -> float:
    return await cluster.metric(f'kvrelay_requests_total{{model="counter",outcome="{outcome}"}}')


async def test_a_prompt_that_takes_longer_than_its_deadline_is_refused(cluster: Cluster) -> None:
    await report(cluster, cluster.prefill)
    error = await status_of(generate(cluster, 10, tokens=100))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    said = str(error.details())
    assert "the first token is expected in 100 s (0 s for the prompts before, 100 s" in said
    left = re.search(r"and the deadline is in (\S+) s \(--deadline-margin\)", said)
    assert left
    assert 0 < float(left[1]) <= 10.1, "gRPC rounds ten seconds up to tenths of one"
    assert await ended(cluster, "deadline_refused") == 1
    assert await ended(cluster, "deadline") == 0
    assert cluster.prefill.submits == cluster.decode.submits == []
    assert (await cluster.stub.GetServerInfo(pb.GetServerInfoRequest())).live_requests == 0


async def test_prompts_that_wait_before_it_count(cluster: Cluster) -> None:
    cluster.count()
    await report(cluster, cluster.prefill, waiting_tokens=100, prompts_by_size=[0, 100])
    error = await status_of(generate(cluster, 20))
    assert "103 s (100 s for the prompts before, 3 s for this one)" in str(error.details())
    assert (await collect(generate(cluster, 60))).token_ids == COUNTED


async def test_prompts_count_that_were_sent_since_the_load_came(cluster: Cluster) -> None:
    await report(cluster, cluster.prefill)
    first = generate(cluster, None, tokens=100)
    await cluster.prefill.submitted()
    error = await status_of(generate(cluster, 60, tokens=100))
    assert "(100 s for the prompts before, 100 s for this one)" in str(error.details())
    first.cancel()
    await until(lambda: len(cluster.prefill.cancels) == 1)


async def test_prompts_that_have_left_do_not_count_though_no_load_came(cluster: Cluster) -> None:
    await report(cluster, cluster.prefill)
    first = generate(cluster, None, tokens=100)
    await cluster.prefill.submitted()
    first.cancel()
    await until(lambda: len(cluster.prefill.cancels) == 1)
    cluster.count()
    assert len((await collect(generate(cluster, 60, tokens=100))).token_ids) == 8


@pytest.mark.parametrize("adaptive", [False, True])
async def test_of_prompts_that_were_sent_only_what_is_not_cached_counts(
    config: RouterConfig, *, adaptive: bool
) -> None:
    if adaptive:
        config = dataclasses.replace(config, placement=PlacementMode.ADAPTIVE)
    async with running(config, "decode-0" if adaptive else "aggregated-0") as cluster:
        [worker] = cluster.workers
        await with_prefix(worker, 300)
        await report(cluster, worker)
        calls = [generate(cluster, None, tokens=300) for _ in range(5)]
        await worker.submitted(5)
        error = await status_of(generate(cluster, 10, tokens=300))
        ahead, own = 5 * (300 - 256), 300 - 256
        said = f"({ahead} s for the prompts before, {own} s for this one)"
        assert said in str(error.details())
        for call in calls:
            call.cancel()
        await until(lambda: len(worker.cancels) == 5)


async def test_prompts_of_less_priority_do_not_count(cluster: Cluster) -> None:
    await report(cluster, cluster.prefill)
    batch = generate(cluster, None, tokens=100, priority=1)
    await cluster.prefill.submitted()
    error = await status_of(generate(cluster, 30, tokens=100))
    assert "(0 s for the prompts before, 100 s for this one)" in str(error.details())
    batch.cancel()
    await until(lambda: len(cluster.prefill.cancels) == 1)


async def test_what_the_worker_is_known_to_have_of_the_prompt_does_not_count(
    cluster: Cluster,
) -> None:
    cluster.count()
    await report(cluster, cluster.prefill)
    error = await status_of(generate(cluster, 25, tokens=100))
    assert "100 s for this one" in str(error.details())
    hashes = PageHashes(cluster.prefill.model, 16)
    marks = hashes.marks_of(prompt(100), ANYBODY.namespace(""))
    update = worker_pb2.PrefixUpdate(number=0, page_size=16, begins=True, stored=marks)
    cluster.prefill.send(worker_pb2.AttachResponse(prefixes=update))
    await report(cluster, cluster.prefill)
    assert len((await collect(generate(cluster, 25, tokens=100))).token_ids) == 8
    error = await status_of(generate(cluster, 10, tokens=100))
    assert "36 s for this one" in str(error.details())


async def test_without_a_deadline_nothing_is_refused(cluster: Cluster) -> None:
    cluster.count()
    await report(cluster, cluster.prefill, waiting_tokens=10_000, prompts_by_size=[10_000])
    assert (await collect(generate(cluster, None))).token_ids == COUNTED


async def test_nothing_is_refused_while_no_speed_is_known(cluster: Cluster) -> None:
    cluster.count()
    unknown = pb.StepSpeeds(seconds_per_step=100, rows_known=True)
    await report(
        cluster,
        cluster.prefill,
        waiting_tokens=10_000,
        prompts_by_size=[10_000],
        speeds=unknown,
    )
    assert (await collect(generate(cluster, 5))).token_ids == COUNTED


async def test_an_estimate_that_is_wrong_by_less_than_the_margin_refuses_nothing(
    config: RouterConfig,
) -> None:
    for margin, is_refused in ((2.0, False), (1.0, True)):
        one = dataclasses.replace(config, deadline_margin=margin)
        async with running(one, "aggregated-0") as cluster:
            cluster.count()
            await report(cluster, cluster.workers[0])
            call = generate(cluster, 60, tokens=90)
            if is_refused:
                assert "is expected in 90 s" in str((await status_of(call)).details())
            else:
                assert len((await collect(call)).token_ids) == 8


async def test_a_margin_of_zero_refuses_nothing(config: RouterConfig) -> None:
    config = dataclasses.replace(config, deadline_margin=0)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await report(cluster, cluster.prefill)
        assert len((await collect(generate(cluster, 5, tokens=200))).token_ids) == 8


async def test_a_reader_of_a_live_request_is_not_refused(cluster: Cluster) -> None:
    first = generate(cluster, None, request_id="a", tokens=100)
    submit = await cluster.prefill.submitted()
    await report(cluster, cluster.prefill)
    second = generate(cluster, 4, request_id="a", tokens=100)
    cluster.prefill.say(submit, 0, (7,))
    assert await read(second, 1) == [(0, 7)]
    cluster.prefill.say(submit, 1, (8,), end=END(reason=END.REASON_STOP))
    assert await read(second) == [(0, 8)]
    assert (await collect(first)).token_ids == [7, 8]


async def test_while_workers_are_missing_it_waits(config: RouterConfig) -> None:
    """A prefill worker is being replaced, and the decode worker; another is there, and busy."""
    config = dataclasses.replace(config, worker_wait=20.0)
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        busy, coming = cluster.workers[:2]
        await report(cluster, busy, waiting_tokens=1000, prompts_by_size=[0, 1000])
        awaited = [coming.endpoint, cluster.decode.endpoint]
        cluster.discovery.replace([busy.endpoint], awaited)
        await cluster.until_lost("prefill-1")
        await cluster.until_lost("decode-0")
        call = generate(cluster, 20)
        await cluster.until_waiting(1)
        attached = len(coming.hellos)
        cluster.discovery.replace([busy.endpoint, coming.endpoint], [cluster.decode.endpoint])
        await until(lambda: len(coming.hellos) > attached)
        await report(cluster, coming)
        cluster.discovery.replace([busy.endpoint, coming.endpoint], [cluster.decode.endpoint])
        fleet = cluster.router._fleet
        await until(lambda: [link.ready for link in fleet.links] == [True, True])
        cluster.list_workers()
        assert (await collect(call)).token_ids == COUNTED
        assert (len(busy.submits), len(coming.submits)) == (0, 1)


async def with_prefix(worker: ScriptedWorker, tokens: int) -> None:
    """The worker has the prompt of so many tokens, but for its last page."""
    marks = PageHashes(worker.model, 16).marks_of(prompt(tokens), ANYBODY.namespace(""))
    update = worker_pb2.PrefixUpdate(number=0, page_size=16, begins=True, stored=marks)
    worker.send(worker_pb2.AttachResponse(prefixes=update))


async def test_a_worker_with_the_prefix_that_is_too_late_leaves_it_to_one_that_is_not(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        busy, idle = cluster.workers[:2]
        await with_prefix(busy, 300)
        await report(cluster, busy, waiting_tokens=400, prompts_by_size=[0] * 5 + [400])
        await report(cluster, idle)
        assert len((await collect(generate(cluster, None, tokens=300))).token_ids) == 8
        assert (len(busy.submits), len(idle.submits)) == (1, 0)
        await report(cluster, busy, waiting_tokens=401, prompts_by_size=[0] * 5 + [401])
        assert len((await collect(generate(cluster, 180, tokens=300))).token_ids) == 8
        assert (len(busy.submits), len(idle.submits)) == (1, 1)


async def test_a_slow_idle_worker_leaves_a_prompt_to_a_fast_busy_one(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        slow, fast = cluster.workers[:2]
        await report(cluster, slow)
        speeds = pb.StepSpeeds(seconds_per_token=0.001, chunk_tokens=512, prompts_known=True)
        by_size = [0] * 5 + [50]
        await report(cluster, fast, speeds=speeds, waiting_tokens=50, prompts_by_size=by_size)
        assert len((await collect(generate(cluster, 10, tokens=100))).token_ids) == 8
        assert (len(slow.submits), len(fast.submits)) == (0, 1)


async def test_a_worker_that_has_measured_nothing_is_taken_to_be_as_fast_as_others(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        measured, new = cluster.workers[:2]
        await report(cluster, measured)
        waits = {"waiting_tokens": 50, "prompts_by_size": [0] * 5 + [50]}
        await report(cluster, new, speeds=pb.StepSpeeds(), **waits)
        assert len((await collect(generate(cluster, 60, tokens=100))).token_ids) == 8
        assert (len(measured.submits), len(new.submits)) == (1, 0)


async def test_a_sooner_worker_that_no_decode_worker_reads_from_is_not_taken(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        slow, refused = cluster.workers[:2]
        speeds = pb.StepSpeeds(seconds_per_token=0.001, chunk_tokens=512, prompts_known=True)
        await report(cluster, refused, speeds=speeds)
        await report(cluster, slow)
        refusal = pb.PeerTransfer(incarnation=refused.incarnation, refusal="too slow")
        cluster.decode.send(worker_pb2.AttachResponse(load=load(), peers=[refusal]))
        await cluster.until_heard(cluster.decode, lambda load: bool(load.peers))
        assert len((await collect(generate(cluster, 60, tokens=100))).token_ids) == 8
        assert (len(slow.submits), len(refused.submits)) == (1, 0)


async def test_what_a_worker_reused_of_others_draws_no_request_there_yet_none_is_refused_for_it(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "prefill-1", "prefill-2", "decode-0") as cluster:
        cluster.count()
        chosen, lucky, in_time = cluster.workers[:3]
        slow = pb.StepSpeeds(seconds_per_token=10, chunk_tokens=512, prompts_known=True)
        await report(cluster, chosen, speeds=slow)
        waits = {"waiting_tokens": 50, "prompts_by_size": [0] * 5 + [50]}
        await report(cluster, in_time, **waits)
        waits = {"waiting_tokens": 200, "prompts_by_size": [0] * 6 + [200]}
        await report(cluster, lucky, **waits, reused_share=0.9)
        assert len((await collect(generate(cluster, 170, tokens=100))).token_ids) == 8
        assert [len(one.submits) for one in (chosen, lucky, in_time)] == [0, 0, 1]
        assert len((await collect(generate(cluster, 30, tokens=100))).token_ids) == 8
        assert [len(one.submits) for one in (chosen, lucky, in_time)] == [0, 0, 2]
        error = await status_of(generate(cluster, 5, tokens=100))
        assert "30 s (20 s for the prompts before, 10 s for this one)" in str(error.details())


async def test_the_soonest_of_all_workers_is_what_a_refusal_tells(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        slow, sooner = cluster.workers[:2]
        await report(cluster, slow)
        speeds = pb.StepSpeeds(seconds_per_token=0.5, chunk_tokens=512, prompts_known=True)
        by_size = [0] * 5 + [50]
        await report(cluster, sooner, speeds=speeds, waiting_tokens=50, prompts_by_size=by_size)
        error = await status_of(generate(cluster, 10, tokens=100))
        assert "75 s (25 s for the prompts before, 50 s for this one)" in str(error.details())
        assert slow.submits == sooner.submits == []


async def test_it_is_refused_when_the_worker_it_waited_for_is_too_slow(
    config: RouterConfig,
) -> None:
    config = dataclasses.replace(config, worker_wait=20.0)
    async with running(config, "prefill-0", "decode-0") as cluster:
        await cluster.prefill.stop()
        cluster.discovery.replace([cluster.decode.endpoint], [cluster.prefill.endpoint])
        await cluster.until_lost("prefill-0")
        call = generate(cluster, 10, tokens=100)
        await cluster.until_waiting(1)
        cluster.prefill.incarnation += "'"
        cluster.prefill.first_load = load()
        cluster.prefill.first_load.speeds.CopyFrom(
            pb.StepSpeeds(seconds_per_token=1, prompts_known=True)
        )
        await cluster.prefill.start()
        cluster.list_workers()
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await ended(cluster, "deadline_refused") == 1
        assert cluster.prefill.submits == cluster.decode.submits == []
