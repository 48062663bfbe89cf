"""Aggregated workers, alone and beside prefill and decode workers."""

from __future__ import annotations

import grpc
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import collect, read, running, status_of
from .scripted_worker import COUNTED, END, RETRACTED, counted, emitted_by


async def test_an_aggregated_worker_serves_alone(config: RouterConfig) -> None:
    async with running(config, "aggregated-0") as cluster:
        cluster.count()
        streamed = await collect(cluster.generate(n=2))
        assert streamed.token_ids == COUNTED
        assert streamed.token_ids_of(1) == [token + 50 for token in COUNTED]
        [submit] = cluster.workers[0].submits
        assert not submit.HasField("prefill")
        [worker] = (await cluster.stub.GetLoads(pb.GetLoadsRequest())).workers
        assert worker.role == pb.WORKER_ROLE_AGGREGATED
        assert cluster.workers[0].cancels == []


async def test_it_may_end_with_the_first_token(config: RouterConfig) -> None:
    async with running(config, "aggregated-0") as cluster:
        call = cluster.generate()
        end = END(reason=END.REASON_STOP, matched_token_id=400)
        cluster.workers[0].say(await cluster.workers[0].submitted(), 0, (400,), end=end)
        complete = (await collect(call)).complete
        assert complete is not None
        assert complete.matched_token_id == 400


async def test_its_retraction_waits_for_nobody(config: RouterConfig) -> None:
    async with running(config, "aggregated-0") as cluster:
        worker, call = cluster.workers[0], cluster.generate(max_tokens=4)
        submit = await worker.submitted()
        worker.say(submit, 0, (counted(submit, 0), counted(submit, 1)))
        worker.say(submit, 2, end=RETRACTED)
        again = await worker.submitted(2)
        assert emitted_by(again) == COUNTED[:2]
        end = END(reason=END.REASON_LENGTH)
        worker.say(again, 2, (counted(again, 2), counted(again, 3)), end=end)
        assert (await collect(call)).token_ids == COUNTED[:4]


async def test_its_abort_is_a_failure(config: RouterConfig) -> None:
    async with running(config, "aggregated-0", "aggregated-1") as cluster:
        cluster.count()
        worker = cluster.workers[0]
        worker.on_submit = None
        call = cluster.generate()
        worker.say(await worker.submitted(), end=END(reason=END.REASON_ABORTED))
        assert (await collect(call)).token_ids == COUNTED


async def test_its_loss_is_not_noticed(config: RouterConfig) -> None:
    async with running(config, "aggregated-0", "aggregated-1") as cluster:
        cluster.count()
        worker = cluster.workers[0]
        worker.on_submit = None
        call = cluster.generate()
        submit = await worker.submitted()
        worker.say(submit, 0, (counted(submit, 0),))
        streamed = await read(call, 1)
        await worker.stop()
        assert [token for _, token in streamed + await read(call)] == COUNTED


async def test_the_last_one_lost_is_named(config: RouterConfig) -> None:
    async with running(config, "aggregated-0") as cluster:
        call = cluster.generate()
        await cluster.workers[0].submitted()
        await cluster.workers[0].stop()
        error = await status_of(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "no aggregated worker" in str(error.details())


@pytest.mark.parametrize("missing", ["prefill-0", "decode-0"])
async def test_a_pair_goes_before_an_aggregated_worker(config: RouterConfig, missing: str) -> None:
    async with running(config, "aggregated-0", "prefill-0", "decode-0") as cluster:
        cluster.count()
        aggregated = cluster.workers[0]
        await collect(cluster.generate())
        assert aggregated.submits == []
        [lost] = [worker for worker in cluster.workers if worker.name == missing]
        await lost.stop()
        await cluster.until_lost(missing)
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert len(aggregated.submits) == 1
