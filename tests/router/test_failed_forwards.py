"""Forwards that fail: who is to blame is found, and nobody else pays for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.wire.worker_info import WorkerRole

from .cluster import Cluster, collect, running, status_of
from .scripted_worker import (
    COUNTED,
    END,
    ScriptedWorker,
    check_emitted,
    count_decode,
    count_prefill,
    say_counted,
    until,
)

FORWARD_FAILED = END(
    reason=END.REASON_FAILED, error="the forward failed", cause=END.CAUSE_FORWARD_FAILED
)
FAILED_ALONE = END(
    reason=END.REASON_FAILED, error="the forward failed", cause=END.CAUSE_FORWARD_FAILED_ALONE
)


async def test_a_failed_batch_is_computed_alone_elsewhere(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        decodes = [worker for worker in cluster.workers if worker.role is WorkerRole.DECODE]
        await until(lambda: any(worker.submits for worker in decodes))
        decodes.sort(key=lambda worker: len(worker.submits))
        other, first = decodes
        other.on_submit = count_decode
        first.say(first.submits[0], end=FORWARD_FAILED)
        assert (await collect(call)).token_ids == COUNTED
        assert [submit.alone for submit in (*first.submits, *other.submits)] == [False, True]
        # The prefill worker's forwards have not failed.
        assert [submit.alone for submit in cluster.prefill.submits] == [False, False]


async def test_failed_batches_cost_no_attempt(cluster: Cluster, config: RouterConfig) -> None:
    """The neighbours may be to blame every time."""
    failures = 3 * config.max_attempts
    call = cluster.generate()
    for number in range(1, failures + 1):
        submit = await cluster.decode.submitted(number)
        if number == failures:
            cluster.count()
        cluster.decode.say(submit, end=FORWARD_FAILED)
    assert (await collect(call)).token_ids == COUNTED


async def test_a_request_that_fails_alone_on_two_workers_is_to_blame(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        call = cluster.generate()
        decodes = [worker for worker in cluster.workers if worker.role is WorkerRole.DECODE]
        for end in (FORWARD_FAILED, FAILED_ALONE):
            await until(lambda: any(worker.submits for worker in decodes))
            worker = next(worker for worker in decodes if worker.submits)
            decodes.remove(worker)
            worker.say(worker.submits[0], end=end)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        blamed = "the forward failed (with this request alone, and before)"
        assert error.details() == f"{worker.name}: {blamed}"


async def test_a_single_worker_has_the_chance_to_be_replaced_first(cluster: Cluster) -> None:
    call = cluster.generate()
    for number in (1, 2):
        cluster.decode.say(await cluster.decode.submitted(number), end=FAILED_ALONE)
    cluster.decode.say(await cluster.decode.submitted(3), end=FAILED_ALONE)
    error = await status_of(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert await cluster.resubmitted("forward_failed_alone") == 2


async def die(cluster: Cluster, worker: ScriptedWorker, killed_by: Any = None) -> None:
    """End a worker, and let its successor say what its last forward computed."""
    last = worker.submits[-1]
    await worker.stop()
    await cluster.until_lost(worker.name)
    worker.incarnation += "-next"
    await worker.start()
    cluster.list_workers()
    await until(lambda: worker.hellos[-1].incarnation == worker.incarnation)
    if killed_by is not None:
        worker.say_late(last, 0, end=killed_by)


async def test_a_request_that_kills_two_processes_is_to_blame(patient: RouterConfig) -> None:
    """The second one alone: it was tried apart from others after the first."""
    async with running(patient, "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        assert not (await cluster.decode.submitted(1)).alone
        await die(cluster, cluster.decode, FORWARD_FAILED)
        assert (await cluster.decode.submitted(2)).alone
        await die(cluster, cluster.decode, FAILED_ALONE)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "the forward failed (with this request alone, and before)"


@pytest.mark.parametrize("killed_by", [None, FORWARD_FAILED])
async def test_a_neighbour_of_what_kills_processes_goes_on(
    patient: RouterConfig, killed_by: Any
) -> None:
    """Whether an operator kills them, or another request."""
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        for number in (1, 2, 3):
            await cluster.decode.submitted(number)
            await die(cluster, cluster.decode, killed_by)
        await cluster.decode.submitted(4)
        cluster.decode.on_submit = count_decode
        cluster.decode.say(cluster.decode.submits[3], end=FORWARD_FAILED)
        assert (await collect(call)).token_ids == COUNTED


async def test_a_death_that_is_told_at_each_connection_is_one(patient: RouterConfig) -> None:
    """As a successor tells it, which does not know who has heard it."""
    config = dataclasses.replace(patient, max_attempts=9)
    async with running(config, "prefill-0", "decode-0") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        killed = await cluster.decode.submitted(1)
        await die(cluster, cluster.decode, FAILED_ALONE)
        for number in (2, 3, 4):
            await cluster.decode.submitted(number)
            cluster.decode.break_stream()
            again = await cluster.decode.submitted(number + 1)
            cluster.decode.say_late(killed, 0, end=FAILED_ALONE)
        await count_decode(cluster.decode, again)
        assert (await collect(call)).token_ids == COUNTED


async def test_a_choice_that_has_gone_on_is_not_to_blame_for_an_earlier_failure(
    cluster: Cluster,
) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate(max_tokens=60)
    for number in range(1, 4):
        submit = await cluster.decode.submitted(number)
        first = check_emitted(cluster.decode, submit) + 1
        for position in range(first, first + 17):
            say_counted(cluster.decode, submit, position)
        cluster.decode.on_submit = count_decode if number == 3 else None
        cluster.decode.say(submit, first + 17, end=FAILED_ALONE)
    assert len((await collect(call)).token_ids) == 60
