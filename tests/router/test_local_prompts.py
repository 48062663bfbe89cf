"""Who computes a prompt: a prefill worker, or the decode worker itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from kvrelay.pacing.chunk_size import LatencyTargets
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.errors import Unavailable
from kvrelay.router.placement.chosen import Reason
from kvrelay.router.placement.estimate import ExpectedPrompts
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.placement.local_prompts import Decision, Side, decide
from kvrelay.v1 import worker_pb2
from kvrelay.wire.load import WorkerLoad, sum_by_size
from kvrelay.wire.speeds import UNMEASURED, StepSpeeds
from kvrelay.wire.worker_info import WorkerRole

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import (
    ScriptedWorker,
    broken,
    count_decode,
    count_prefill,
    say_counted,
    until,
)
from .test_limits import endpoint

SPEEDS = StepSpeeds(
    seconds_per_step=0.012,
    seconds_per_token=0.0005,
    seconds_per_pair=1e-7,
    seconds_per_row=0.0008,
    chunk_tokens=512,
    prompts_known=True,
    rows_known=True,
)
OF_ROWS = replace(SPEEDS, seconds_per_token=0.0, seconds_per_pair=0.0, prompts_known=False)
OF_PROMPTS = replace(SPEEDS, seconds_per_row=0.0, rows_known=False)


def prefill(*prompts: int, cached: int = 0, speeds: StepSpeeds = OF_PROMPTS) -> Side:
    load = WorkerLoad(speeds=speeds, prompts_by_size=sum_by_size(prompts))
    return Side(ExpectedPrompts(WorkerRole.PREFILL, load), cached, len(prompts))


def decode(
    running: int, *prompts: int, cached: int = 0, left: int = 0, speeds: StepSpeeds = SPEEDS
) -> Side:
    """A decode worker whose running requests have `left` tokens to generate, each of them."""
    load = WorkerLoad(
        running_requests=running,
        speeds=speeds,
        prompts_by_size=sum_by_size(prompts),
        growth_tokens=running * left,
    )
    queue = ExpectedPrompts(WorkerRole.DECODE, load)
    return Side(queue, cached, running + len(prompts))


BY_PREFILL, BY_DECODE = Decision(False, Reason.SOONER), Decision(True, Reason.SOONER)


def test_an_idle_decode_worker_computes_it() -> None:
    assert decide(1024, prefill(), decode(0)) == Decision(True, Reason.IDLE)
    unmeasured = decode(0, speeds=UNMEASURED)
    assert decide(1024, prefill(speeds=UNMEASURED), unmeasured) == Decision(True, Reason.IDLE)


def test_an_idle_decode_worker_that_is_slow_does_not() -> None:
    slow = replace(SPEEDS, seconds_per_token=0.001)
    assert decide(1024, prefill(), decode(0, speeds=slow)) == BY_PREFILL
    assert decide(1024, prefill(1024, 1024, 1024), decode(0, speeds=slow)).by_decode


def test_a_long_prompt_does_not_go_into_a_busy_decode_worker() -> None:
    assert decide(1024, prefill(), decode(8)) == BY_PREFILL


def test_a_short_suffix_goes_to_who_has_the_rest() -> None:
    assert decide(1024, prefill(), decode(8, cached=1000)) == BY_DECODE
    assert decide(1024, prefill(cached=1000), decode(8, cached=1000)) == BY_PREFILL


def test_what_a_saturated_prefill_worker_cannot_take_goes_to_the_decode_worker() -> None:
    assert decide(1024, prefill(*[1024] * 4), decode(3)) == BY_DECODE
    # Until that one has as much to compute, at its lower pace.
    assert decide(1024, prefill(*[1024] * 4), decode(3, *[1024] * 4)) == BY_PREFILL
    # Or generates for so many that they would lose more.
    assert decide(1024, prefill(*[1024] * 4), decode(16, left=128)) == BY_PREFILL


def test_prompts_of_equal_length_come_before_it() -> None:
    """At a power of two, too, though they have as many tokens as the shortest of their size."""
    for tokens in (1000, 1024, 1030):
        queued = prefill(*[tokens] * 4)
        # Four there, and one here.
        assert decide(tokens, queued, decode(3, tokens)) == BY_DECODE


def test_a_decode_worker_with_more_outputs_than_there_are_prompts_is_left_alone() -> None:
    """Its requests would wait for the prompt, and the prefill worker would for them."""
    queued = prefill(*[256] * 6)
    assert decide(256, queued, decode(8, left=8)) == BY_DECODE
    assert decide(256, queued, decode(8, left=128)) == BY_PREFILL
    # A short suffix costs them next to nothing.
    assert decide(256, queued, decode(8, left=128, cached=250)) == BY_DECODE


def test_outputs_of_requests_that_wait_count_as_those_of_earlier_ones() -> None:
    queued = prefill(*[256] * 6)
    load = WorkerLoad(running_requests=2, speeds=SPEEDS, growth_tokens=16, output_tokens=128)
    queue = ExpectedPrompts(WorkerRole.DECODE, load)
    assert decide(256, queued, Side(queue, num_requests=2)) == BY_DECODE
    assert decide(256, queued, Side(queue, num_requests=16)) == BY_PREFILL


def test_a_prefill_worker_with_a_long_queue_sets_the_pace_though_decode_has_as_much_to_do() -> None:
    """The last of its prompts generates all of its output after that."""
    queued = prefill(*[256] * 8)  # 1.1 s

    def busy(output_tokens: int, *prompts: int) -> Side:
        load = replace(decode(12, *prompts, left=70).queue.load, output_tokens=output_tokens)
        return Side(ExpectedPrompts(WorkerRole.DECODE, load), num_requests=12)

    assert decide(256, queued, busy(1)) == BY_PREFILL
    assert decide(256, queued, busy(128)) == BY_DECODE
    assert decide(256, queued, busy(128, 16)) == BY_PREFILL, "it computes some already"


def test_a_prefill_worker_that_reads_the_session_computes_the_rest_only() -> None:
    """If that is sooner: else it computes all, or the worker that has the session does."""
    home = decode(8, cached=3000)
    assert decide(3600, prefill(), home) == BY_DECODE
    lent = replace(prefill(), lent_tokens=3000, lent_seconds=0.01)
    assert decide(3600, lent, home) == Decision(False, Reason.SOONER, lent_tokens=3000)
    assert decide(3600, replace(lent, lent_seconds=60.0), home) == BY_DECODE


def test_prompts_in_steps_come_before_it_too() -> None:
    """A prefill worker does not report what its steps compute; it has not begun to generate."""
    home = decode(3, left=8)
    idle = prefill()
    assert decide(256, idle, home) == BY_PREFILL

    def not_begun(tokens: float, speeds: StepSpeeds = OF_PROMPTS) -> Side:
        load = replace(idle.queue.load, speeds=speeds)
        return replace(idle, queue=replace(idle.queue, load=load, backlog_tokens=tokens))

    assert decide(256, not_begun(100), home) == BY_PREFILL
    assert decide(256, not_begun(1024), home) == BY_DECODE
    # Of a long prompt, no more than two steps are under way.
    small = replace(OF_PROMPTS, chunk_tokens=64)
    assert decide(256, not_begun(4096, small), home) == BY_PREFILL


def test_a_looser_target_lets_more_prompts_in() -> None:
    busy, queued = decode(8), prefill(1024)
    assert not decide(1024, queued, busy, LatencyTargets(itl_seconds=0.025)).by_decode
    assert decide(1024, queued, busy, LatencyTargets(itl_seconds=0.3)).by_decode


def test_a_target_for_first_tokens_that_steps_must_lengthen_for_lets_more_prompts_in() -> None:
    busy, queued = decode(8), prefill(256)
    for target in (None, 60.0):
        assert not decide(4096, queued, busy, LatencyTargets(ttft_seconds=target)).by_decode
    assert decide(4096, queued, busy, LatencyTargets(ttft_seconds=3.0)).by_decode


def test_a_decode_worker_that_has_computed_none_is_taken_to_be_as_fast() -> None:
    queued = prefill(*[1024] * 4)
    assert decide(1024, queued, decode(3, speeds=OF_ROWS)) == BY_DECODE
    assert decide(1024, prefill(), decode(8, speeds=OF_ROWS)) == BY_PREFILL


def test_a_prefill_worker_that_has_computed_none_is_taken_to_be_as_fast() -> None:
    assert decide(1024, prefill(speeds=UNMEASURED), decode(8)) == BY_PREFILL
    queued = prefill(*[1024] * 4, speeds=UNMEASURED)
    assert decide(1024, queued, decode(3)) == BY_DECODE


def test_without_speeds_who_has_less_to_compute_computes_it() -> None:
    unknown, unmeasured = Decision(False, Reason.UNKNOWN), prefill(speeds=UNMEASURED)
    assert decide(16, unmeasured, decode(8, speeds=OF_ROWS)) == unknown
    assert decide(16, prefill(), decode(8, speeds=UNMEASURED)) == unknown
    queued = prefill(1024, 1024, speeds=UNMEASURED)
    by_decode = Decision(True, Reason.UNKNOWN)
    assert decide(16, queued, decode(1, 1024, speeds=OF_ROWS)) == by_decode
    assert decide(16, queued, decode(1, 1024, 1024, speeds=OF_ROWS)) == unknown


def test_limits_of_decode_workers_alone() -> None:
    alone = [endpoint(WorkerRole.DECODE, 20)]
    assert RequestLimits.of(alone, decodes_alone=True) == RequestLimits(100, 64, 20, 20)
    small = [*alone, endpoint(WorkerRole.PREFILL, 10)]
    assert RequestLimits.of(small, decodes_alone=True) == RequestLimits(100, 64, 20, 20)
    with pytest.raises(Unavailable, match="decode"):
        RequestLimits.of([endpoint(WorkerRole.PREFILL, 10)], decodes_alone=True)


@pytest.fixture
def adaptive(config: RouterConfig) -> RouterConfig:
    return replace(config, placement=PlacementMode.ADAPTIVE)


COUNTED = [4, 5, 6, 7, 8, 9, 10, 11]


async def placed(cluster: Cluster, role: str, reason: str) -> float:
    labels = f'computed_by="{role}",model="counter",reason="{reason}"'
    return await cluster.metric(f"kvrelay_placements_total{{{labels}}}")


async def test_decode_workers_serve_without_any_prefill_worker(adaptive: RouterConfig) -> None:
    async with running(adaptive, "decode-0") as cluster:
        cluster.count()
        streamed = await collect(cluster.generate(n=2))
        assert streamed.token_ids == COUNTED
        assert streamed.token_ids_of(1) == [token + 50 for token in COUNTED]
        [submit] = cluster.decode.submits
        assert not submit.HasField("prefill")
        assert await placed(cluster, "decode", "no_choice") == 1
        assert cluster.decode.cancels == []


async def test_a_lost_prefill_worker_stops_nobody(adaptive: RouterConfig) -> None:
    async with running(adaptive, "prefill-0", "decode-0") as cluster:
        calls = [cluster.generate()]
        local = await cluster.decode.submitted()
        calls.append(cluster.generate())
        assert (await cluster.decode.submitted(2)).HasField("prefill")
        assert await placed(cluster, "prefill", "unknown") == 1
        await cluster.prefill.stop()
        again = await cluster.decode.submitted(3)
        assert not again.HasField("prefill")
        for submit in (local, again):
            for position in range(8):
                say_counted(cluster.decode, submit, position)
        for call in calls:
            assert (await collect(call)).token_ids == COUNTED
        assert await placed(cluster, "decode", "no_choice") == 1


async def test_an_idle_decode_worker_is_asked_itself(adaptive: RouterConfig) -> None:
    async with running(adaptive, "prefill-0", "decode-0") as cluster:
        cluster.count()
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert cluster.prefill.submits == []
        assert await placed(cluster, "decode", "idle") == 1


async def test_disaggregated_placement_always_hands_over(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert len(cluster.prefill.submits) == 1
        assert await placed(cluster, "prefill", "mode") == 1
        await cluster.prefill.stop()
        await cluster.until_lost("prefill-0")
        cluster.workers.remove(cluster.prefill)
        cluster.list_workers()
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_request_waits_for_a_decode_worker_that_comes(adaptive: RouterConfig) -> None:
    async with running(adaptive, "decode-0") as cluster:
        await cluster.decode.stop()
        await cluster.until_lost("decode-0")
        call = cluster.generate()
        reading = asyncio.create_task(read(call))
        await cluster.decode.start()
        cluster.list_workers()
        cluster.count()
        assert [token for _, token in await reading] == COUNTED


async def broken_prompt(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    """A decode worker that cannot compute prompts."""
    if not submit.HasField("prefill"):
        worker.say(submit, end=broken())
    else:
        await count_decode(worker, submit)


async def broken_pull(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    """A decode worker that can read from no prefill worker."""
    if submit.HasField("prefill"):
        worker.say(submit, end=broken())
    else:
        await count_decode(worker, submit)


@pytest.mark.parametrize("decodes", [["decode-0"], ["decode-0", "decode-1"]])
async def test_after_a_prompt_that_failed_by_a_decode_worker_a_prefill_worker_gets_it(
    adaptive: RouterConfig, decodes: list[str]
) -> None:
    async with running(adaptive, "prefill-0", *decodes) as cluster:
        cluster.count()
        for worker in cluster.workers[1:]:
            worker.on_submit = broken_prompt
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert len(cluster.prefill.submits) == 1
        assert await placed(cluster, "decode", "idle") == 1
        assert await placed(cluster, "prefill", "suspect") == 1


async def test_after_a_hand_over_that_failed_another_decode_worker_computes_the_prompt(
    adaptive: RouterConfig,
) -> None:
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    async with running(adaptive, *names) as cluster:
        busy = [cluster.generate(), cluster.generate()]
        decodes = cluster.workers[2:]
        await asyncio.gather(*(worker.submitted() for worker in decodes))
        cluster.count()
        for worker in decodes:
            worker.on_submit = broken_pull
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert await placed(cluster, "prefill", "unknown") == 1
        assert await placed(cluster, "decode", "suspect") == 1
        for call in busy:
            call.cancel()
        await until(lambda: all(worker.cancels for worker in decodes))


async def test_after_an_aggregated_worker_failed_a_pair_decides_as_ever(
    adaptive: RouterConfig,
) -> None:
    async with running(adaptive, "aggregated-0", "prefill-0", "decode-0") as cluster:
        alone, pair = cluster.workers[0], cluster.workers[1:]
        cluster.discovery.replace([alone.endpoint], [])
        await until(lambda: len(cluster.router._fleet.links) == 1)
        call = cluster.generate()
        submit = await alone.submitted()
        cluster.list_workers()
        await until(lambda: [one.ready for one in cluster.router._fleet.links] == [True] * 3)
        cluster.count()
        alone.say(submit, end=broken())
        assert (await collect(call)).token_ids == COUNTED
        assert [len(worker.submits) for worker in pair] == [0, 1]
        assert await placed(cluster, "decode", "idle") == 1


async def test_after_its_prefill_worker_was_lost_a_prompt_goes_where_it_is_sooner(
    adaptive: RouterConfig,
) -> None:
    async with running(adaptive, "prefill-0", "prefill-1", "decode-0") as cluster:
        busy = cluster.generate()
        await cluster.decode.submitted()
        cluster.decode.on_submit = count_decode
        cluster.workers[1].on_submit = count_prefill
        call = cluster.generate()
        await cluster.prefill.submitted()
        await cluster.prefill.stop()
        assert (await collect(call)).token_ids == COUNTED
        assert await placed(cluster, "prefill", "unknown") == 2
        busy.cancel()
        await until(lambda: len(cluster.decode.cancels) >= 1)
