"""What is computed again, how often and where."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import (
    COUNTED,
    END,
    ScriptedWorker,
    broken,
    check_emitted,
    choices_of,
    count_decode,
    count_prefill,
    emitted_by,
    load,
    retract_after,
    say_counted,
    until,
)

CAUSES = {
    "peer_lost": END.CAUSE_PEER_LOST,
    "forward_failed": END.CAUSE_FORWARD_FAILED,
    "page_mismatch": END.CAUSE_PAGE_MISMATCH,
    "transfer_refused": END.CAUSE_TRANSFER_REFUSED,
    "failed": END.CAUSE_FAILED,
}


@pytest.mark.parametrize("reason", CAUSES)
async def test_each_recomputation_is_counted_by_its_reason(cluster: Cluster, reason: str) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate()
    cluster.decode.say(await cluster.decode.submitted(), end=broken(CAUSES[reason]))
    cluster.decode.on_submit = count_decode
    assert (await collect(call)).token_ids == COUNTED
    assert await cluster.resubmitted(reason) == 1


async def test_a_cause_that_is_not_known_yet_is_a_failure(cluster: Cluster) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate()
    cluster.decode.say(await cluster.decode.submitted(), end=broken(99))
    cluster.decode.on_submit = count_decode
    assert (await collect(call)).token_ids == COUNTED
    assert await cluster.resubmitted("failed") == 1


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("peer_lost", grpc.StatusCode.UNAVAILABLE),
        ("page_mismatch", grpc.StatusCode.DATA_LOSS),
        ("transfer_refused", grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_strict_fails_what_would_be_computed_again(
    config: RouterConfig, reason: str, status: grpc.StatusCode
) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        cluster.decode.say(await cluster.decode.submitted(), end=broken(CAUSES[reason]))
        error = await status_of(call)
        assert error.code() is status
        assert error.details() == (
            f"{reason}: decode-0: pull: broken (--strict: it is not computed again)"
        )
        failures = f'kvrelay_strict_failures_total{{model="counter",reason="{reason}"}}'
        assert await cluster.metric(failures) == 1
        assert await cluster.resubmitted(reason) == 0
        assert len(cluster.decode.submits) == 1


async def test_strict_names_a_lost_worker(config: RouterConfig) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
        await cluster.decode.stop()
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("worker_lost: worker decode-0 was lost: ")


async def test_strict_goes_on_after_a_retraction(config: RouterConfig) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = retract_after(3)
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert await cluster.resubmitted("retracted") == 1


async def test_attempts_are_bounded(cluster: Cluster, config: RouterConfig) -> None:
    call = cluster.generate()
    for number in range(1, config.max_attempts + 1):
        cluster.decode.say(await cluster.decode.submitted(number), end=broken())
    error = await status_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == "decode-0: pull: broken (attempt 3 of 3)"
    await until(lambda: len(cluster.prefill.cancels) == 3)
    await asyncio.sleep(0.2)
    assert len(cluster.decode.submits) == 3


async def test_a_new_token_gives_all_attempts_back(cluster: Cluster, config: RouterConfig) -> None:
    """Every attempt breaks, but each has brought tokens; then they bring none any more."""
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate(max_tokens=20)
    for number in range(1, 3 * config.max_attempts):
        submit = await cluster.decode.submitted(number)
        say_counted(cluster.decode, submit, check_emitted(cluster.decode, submit) + 1)
        await read(call, 2)  # one of each worker
        cluster.decode.say(submit, len(emitted_by(submit)) + 2, end=broken())
    cluster.prefill.on_submit = None
    for number in range(3 * config.max_attempts, 4 * config.max_attempts - 1):
        cluster.decode.say(await cluster.decode.submitted(number), end=broken())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.details() == "decode-0: pull: broken (attempt 3 of 3)"


async def test_each_choice_has_attempts_of_its_own(cluster: Cluster) -> None:
    """One worker that dies with three choices is one failure of each, not three of one."""
    cluster.count()
    cluster.decode.on_submit = None
    call = cluster.generate(n=3)
    streamed = await read(call, 3)  # the prefill worker's: from here on the choices go apart
    for number in (1, 2):
        for submit in [await cluster.decode.submitted(k) for k in range(number, 3 * number - 1)]:
            first = len(emitted_by(submit)) + 1
            for choice in choices_of(submit):
                cluster.decode.say(submit, first, (), choice=choice, end=broken())
    await cluster.decode.submitted(7)
    for submit in cluster.decode.submits[4:]:
        await count_decode(cluster.decode, submit)
    streamed += await read(call)
    for choice in range(3):
        first = 4 + 50 * choice
        assert [t for c, t in streamed if c == choice] == list(range(first, first + 8))


async def test_the_next_attempt_is_made_elsewhere_if_there_is_an_elsewhere(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        first, other = cluster.workers[1:]
        await cluster.report(other, load(free=32))
        first.on_submit = None
        call = cluster.generate()
        first.say(await first.submitted(), end=broken())
        assert (await collect(call)).token_ids == COUNTED
        assert (len(first.submits), len(other.submits)) == (1, 1)
        await collect(cluster.generate(max_tokens=1))
        assert len(first.submits) == 2, "for others it is as good as any"


async def refuse(cluster: Cluster, worker: ScriptedWorker, *prefills: ScriptedWorker) -> None:
    """A decode worker says that it does not read from these, and that it knows nobody else.

    The router has heard then.
    """
    refused = [
        pb.PeerTransfer(incarnation=one.incarnation, refusal=f"{one.name} is slow")
        for one in prefills
    ]
    before = ["prefill-0-1", "prefill-1-1"]
    worker.send(worker_pb2.AttachResponse(load=load(), peers=refused, gone_peers=before))
    names = {one.incarnation for one in refused}
    await cluster.until_heard(worker, lambda load: {one.incarnation for one in load.peers} == names)


async def test_no_request_goes_to_a_pair_that_is_refused(config: RouterConfig) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    async with running(config, *names) as cluster:
        cluster.count()
        prefills, decodes = cluster.workers[:2], cluster.workers[2:]
        await refuse(cluster, decodes[0], *prefills)
        await refuse(cluster, decodes[1], prefills[0])
        for _ in range(3):
            assert (await collect(cluster.generate())).token_ids == COUNTED
        assert [len(one.submits) for one in cluster.workers] == [0, 3, 0, 3]
        await refuse(cluster, decodes[1], *prefills)
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "prefill-1 is slow" in (error.details() or "")
        assert await cluster.metric("kvrelay_worker_waits_total{") == 0, "nobody is on the way"
        await refuse(cluster, decodes[0])
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert [len(one.submits) for one in decodes] == [1, 3]


async def test_a_request_that_waits_out_a_refusal_goes_on_when_it_ends(
    patient: RouterConfig,
) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        met = await cluster.decode.submitted()
        await refuse(cluster, cluster.decode, cluster.prefill)
        why = END(reason=END.REASON_FAILED, cause=END.CAUSE_TRANSFER_REFUSED)
        cluster.decode.say(met, end=why)
        await asyncio.sleep(0.3)
        assert len(cluster.decode.submits) == 1
        cluster.decode.on_submit = count_decode
        await refuse(cluster, cluster.decode)
        assert (await collect(call)).token_ids == COUNTED
