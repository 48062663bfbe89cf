"""A worker that drains gets no new requests, and none of its requests is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping

import grpc
import pytest

from kvrelay.deploy.controller.changes.steps import (
    DrainPhase,
    DrainStep,
    RollOrder,
    ScalePhase,
    ScaleStep,
)
from kvrelay.deploy.controller.operators.operators_listener import OperatorServices
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import CannotShift, UnknownWorker
from kvrelay.router.router import Router
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, worker_pb2
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerRole
from tests.known import known

from .cluster import Cluster, collect, read, running
from .scripted_worker import (
    COUNTED,
    END,
    HANDED_OVER,
    RETRACTED,
    SECONDS,
    ScriptedWorker,
    count_decode,
    count_prefill,
    load,
    until,
)

GONE = END(
    reason=END.REASON_FAILED,
    error="the decode worker left",
    cause=END.CAUSE_PEER_LOST,
)


@pytest.fixture
def patient(config: RouterConfig) -> RouterConfig:
    return dataclasses.replace(config, worker_wait=60.0)


def say_draining(worker: ScriptedWorker) -> None:
    said = load()
    said.draining = True
    worker.send(worker_pb2.AttachResponse(load=said))


async def until_draining(cluster: Cluster, name: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            loads = await cluster.stub.GetLoads(pb.GetLoadsRequest())
            if any(one.draining for one in loads.workers if one.worker == name):
                return


@pytest.mark.parametrize("draining", ["prefill-0", "decode-0"])
async def test_a_worker_that_drains_gets_nothing_new(config: RouterConfig, draining: str) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    async with running(config, *names) as cluster:
        cluster.count()
        worker = next(one for one in cluster.workers if one.name == draining)
        say_draining(worker)
        await until_draining(cluster, draining)
        for _ in range(4):
            assert (await collect(cluster.generate())).token_ids == COUNTED
        assert worker.submits == []


@pytest.mark.parametrize("choices", [1, 3])
async def test_what_prefill_turns_away_goes_on_elsewhere(
    config: RouterConfig, choices: int
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        draining, other = cluster.workers[:2]
        draining.on_submit = None
        cluster.decode.on_submit = None
        call = cluster.generate(n=choices)
        submit = await draining.submitted()
        old = await cluster.decode.submitted()
        cluster.decode.on_submit = count_decode
        say_draining(draining)
        for choice in range(choices):
            draining.say(submit, choice=choice, end=RETRACTED)
        streamed = await collect(call)
        for choice in range(choices):
            first = 4 + 50 * choice
            assert streamed.token_ids_of(choice) == list(range(first, first + 8))
        # All choices go on together, and the decode side was told.
        assert len(other.submits) == 1
        assert [cancel.attempt for cancel in cluster.decode.cancels] == [old.attempt]
        assert await cluster.resubmitted("retracted") == 1


@pytest.mark.parametrize("heard", ["cancelled", "computed", "broken"])
async def test_what_decode_turns_away_ends_on_the_other_side(
    config: RouterConfig, heard: str
) -> None:
    """The prompt may be computed meanwhile, and its first token is kept then."""
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        draining = cluster.decode
        cluster.prefill.on_submit = draining.on_submit = None
        call = cluster.generate()
        decode, prefill = await draining.submitted(), await cluster.prefill.submitted()
        cluster.prefill.on_submit = count_prefill
        if heard == "computed":
            cluster.prefill.say(prefill, 0, (4,), end=HANDED_OVER)
            await read(call, 1)
        say_draining(draining)
        await until_draining(cluster, "decode-0")
        if heard == "broken":  # it overtakes what the decode worker says
            cluster.prefill.say(prefill, end=GONE)
            await cluster.prefill.submitted(2)
        draining.say(decode, end=RETRACTED)
        rest = [token for _, token in await read(call)]
        assert rest == (COUNTED[1:] if heard == "computed" else COUNTED)
        assert len(cluster.prefill.submits[1].input_ids) == (4 if heard == "computed" else 3)
        hurried = [cancel.attempt for cancel in cluster.prefill.cancels]
        assert hurried == ([prefill.attempt] if heard == "cancelled" else [])
        assert await cluster.resubmitted() == await cluster.resubmitted("retracted")


async def test_a_draining_worker_that_is_lost_costs_no_attempt(config: RouterConfig) -> None:
    config = dataclasses.replace(config, max_attempts=1)
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        draining = cluster.decode
        draining.on_submit = None
        call = cluster.generate()
        await draining.submitted()
        await read(call, 1)
        say_draining(draining)
        await until_draining(cluster, "decode-0")
        await draining.stop()
        assert [token for _, token in await read(call)] == COUNTED[1:]
        assert await cluster.resubmitted() == await cluster.resubmitted("retracted")


@pytest.mark.parametrize("cause", ["PAGE_MISMATCH", "READ_FAILED", "TRANSFER_REFUSED"])
async def test_a_drain_does_not_explain_everything(config: RouterConfig, cause: str) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        draining = cluster.decode
        draining.on_submit = None
        call = cluster.generate()
        decode = await draining.submitted()
        say_draining(draining)
        await until_draining(cluster, "decode-0")
        why = END.Cause.Value(f"CAUSE_{cause}")
        draining.say(decode, end=END(reason=END.REASON_FAILED, cause=why))
        assert (await collect(call)).token_ids == COUNTED
        assert await cluster.resubmitted(cause.lower()) == await cluster.resubmitted() == 1


async def test_new_requests_wait_for_the_successor_of_an_only_worker(
    patient: RouterConfig,
) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.count()
        old = cluster.decode
        draining = dataclasses.replace(old.endpoint, draining=True)
        cluster.discovery.replace([cluster.prefill.endpoint, draining])
        await until_draining(cluster, "decode-0")
        await old.stop()
        calls = [asyncio.create_task(collect(cluster.generate())) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls)
        assert cluster.prefill.submits == []
        old.incarnation = "decode-0-2"
        cluster.list_workers()  # it is listed a moment before it can be reached
        await asyncio.sleep(0.1)
        calls.append(asyncio.create_task(collect(cluster.generate())))
        await asyncio.sleep(0.1)
        await old.start()
        assert [streamed.token_ids for streamed in await asyncio.gather(*calls)] == [COUNTED] * 4
        assert await cluster.resubmitted("retracted") == 0


async def test_that_wait_ends(config: RouterConfig) -> None:
    config = dataclasses.replace(config, worker_wait=0.2)
    async with running(config, "prefill-0", "decode-0") as cluster:
        draining = dataclasses.replace(cluster.decode.endpoint, draining=True)
        cluster.discovery.replace([cluster.prefill.endpoint, draining])
        await until_draining(cluster, "decode-0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.generate())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        details = str(caught.value.details())
        assert details.startswith("no decode worker that could hold the request is ready, and none")


class Operator:
    """Drains what it is told to when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.go_on = asyncio.Event()

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        if worker != "decode-0":
            raise UnknownWorker(worker, ["prefill-0", "decode-0"])
        self.asked.append((worker, remove))
        yield DrainStep(DrainPhase.DRAINING, "decode-0-1")
        await self.go_on.wait()
        yield DrainStep(DrainPhase.LEFT, "decode-0-1")
        yield DrainStep(DrainPhase.READY, "decode-0-2")

    async def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        for role, count in wanted.items():
            yield ScaleStep(f"{role}-{count}", ScalePhase.STARTING)
            yield ScaleStep(f"{role}-{count}", ScalePhase.FAILED, "no room")

    async def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        for name, text in order.options.items():
            yield ScaleStep(f"{name}={text}", ScalePhase.FAILED, str(order.max_surge))

    async def shift(self, successor: str) -> None:
        raise CannotShift(f"not to {successor}")

    async def state(self) -> ClusterState:
        raise NotImplementedError


async def test_operators_scale_the_roles_that_they_name(config: RouterConfig) -> None:
    discovery = StaticDiscovery([])
    router = Router(config, discovery, OperatorServices(Operator(), discovery, "default"))
    await router.start()
    try:
        async with grpc.aio.insecure_channel(known(router.admin_address)) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            request = admin_pb2.ScaleWorkersRequest(decode=5)
            steps = [(one.worker, one.reason) async for one in admin.ScaleWorkers(request)]
            assert steps == [("decode-5", ""), ("decode-5", "no room")]
    finally:
        await router.stop()


async def test_operators_are_told_of_each_phase_and_of_what_is_left(config: RouterConfig) -> None:
    worker = ScriptedWorker("decode-0", WorkerRole.DECODE)
    await worker.start()
    operator, discovery = Operator(), StaticDiscovery([worker.endpoint])
    router = Router(config, discovery, OperatorServices(operator, discovery, "default"))
    await router.start()
    try:
        async with grpc.aio.insecure_channel(known(router.admin_address)) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            call = admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker="decode-0", remove=True))
            answers = aiter(call)
            first = await anext(answers)
            assert (first.phase, first.requests) == (first.PHASE_DRAINING, 0)
            await until(lambda: bool(worker.hellos))
            worker.send(worker_pb2.AttachResponse(load=pb.WorkerLoad(running_requests=3)))
            second = await anext(answers)
            assert (second.phase, second.requests) == (second.PHASE_DRAINING, 3)
            operator.go_on.set()
            rest = [answer async for answer in answers]
            assert [answer.phase for answer in rest] == [first.PHASE_LEFT, first.PHASE_READY]
            assert [answer.incarnation for answer in rest] == ["decode-0-1", "decode-0-2"]
            assert operator.asked == [("decode-0", True)]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker="x")).read()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert caught.value.details() == (
                "worker: there is no 'x'; the workers are: decode-0, prefill-0"
            )
    finally:
        await router.stop()
        await worker.stop()
