"""When a router is told a worker's load, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import pytest

from benchmarks.virtual_time import VirtualLoop
from kvrelay.engine.scheduler.commands import Attach, Inbox
from kvrelay.engine.worker.load_reports import INTERVAL_SECONDS, LONGEST_SECONDS, PacedLink
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.net.channels import bind, worker_channel, worker_server
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.load import PeerTransport, PoolCounts, WorkerLoad
from kvrelay.wire.messages import ATTACH_REQUEST
from kvrelay.wire.output import EngineOutputs, RequestOutput
from kvrelay.wire.submit import AttachHello, AttachRequest, RequestKey
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerRole

IDLE = WorkerLoad()
BUSY = WorkerLoad(running_requests=1)
OUTPUT = RequestOutput(RequestKey("router", "a", 1), 0)


class Told:
    """A paced link and what its router is told, with the times since the beginning."""

    def __init__(self) -> None:
        self.link = PacedLink("router")
        self.steps: list[tuple[float, EngineOutputs]] = []
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._reader = asyncio.create_task(self._read())

    @property
    def loads(self) -> list[tuple[float, WorkerLoad]]:
        return [(when, step.load) for when, step in self.steps if step.load is not None]

    async def say(self, load: WorkerLoad | None, *outputs: RequestOutput) -> None:
        """The engine delivers a step."""
        self.link.deliver(EngineOutputs(outputs, load))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.link.close()
        await self._reader

    async def _read(self) -> None:
        async for step in self.link:
            self.steps.append((round(self._loop.time() - self._begun, 6), step))


def virtual(work: Callable[[Told], Coroutine[Any, Any, None]]) -> None:
    """Runs `work` with a link, in virtual time."""

    async def run() -> None:
        told = Told()
        await work(told)
        await told.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_the_first_change_is_told_at_once_and_the_next_ones_together() -> None:
    async def work(told: Told) -> None:
        await told.say(IDLE)
        await asyncio.sleep(5)
        for number in range(1, 9):
            await told.say(replace(BUSY, running_requests=number))
            await asyncio.sleep(0.03)
        await asyncio.sleep(5)
        told_of = [(when, load.running_requests) for when, load in told.loads]
        assert told_of == [(0.0, 0), (5.0, 1), (5.3, 8)]

    virtual(work)


def test_the_first_work_of_an_idle_worker_is_told_at_once_but_not_without_end() -> None:
    async def work(told: Told) -> None:
        for _ in range(100):
            await told.say(IDLE)
            await asyncio.sleep(0.011)
            await told.say(BUSY)
            await asyncio.sleep(0.009)
        when, load = told.loads[1]
        assert (when, load.running_requests) == (0.011, 1)
        assert len(told.loads) <= 2.0 / INTERVAL_SECONDS + 2
        await asyncio.sleep(1)
        assert told.loads[-1][1] == BUSY

    virtual(work)


@pytest.mark.parametrize("seed", range(5))
def test_a_router_is_told_ten_loads_a_second_at_most_and_always_the_last(seed: int) -> None:
    rng = random.Random(seed)

    async def work(told: Told) -> None:
        for _ in range(20):
            load = IDLE
            for _ in range(rng.randrange(1, 200)):
                load = WorkerLoad(
                    waiting_requests=rng.randrange(3),
                    running_requests=rng.randrange(2),
                    waiting_tokens=rng.randrange(100),
                    pools=(PoolCounts("full", 16, 100, rng.randrange(100), 0, 0, 0, 0, 0, 0),),
                    growth_tokens=rng.randrange(9),
                )
                await told.say(load)
                await asyncio.sleep(rng.expovariate(50))
            await asyncio.sleep(LONGEST_SECONDS)
            assert told.loads[-1][1] == load
        times = [when for when, _ in told.loads]
        for first in range(len(times)):
            for last in range(first + 1, len(times)):
                slots = (times[last] - times[first]) / INTERVAL_SECONDS
                assert last - first <= slots + 1 + 1e-3

    virtual(work)


def test_a_small_change_waits_longer_unless_the_worker_is_idle() -> None:
    def load(free: int, running: int) -> WorkerLoad:
        pools = (PoolCounts("full", 16, 1000, free, 1000 - free, 0, 0, 0, 0, 0),)
        return WorkerLoad(running_requests=running, pools=pools)

    async def work(told: Told) -> None:
        await told.say(load(500, 1))
        await asyncio.sleep(0.5)
        for free in (499, 498, 497):
            await told.say(load(free, 1))
        await asyncio.sleep(2)
        await told.say(load(400, 1))
        await told.say(load(399, 1))
        await told.say(load(400, 1))  # as it was told: there is nothing to say
        await asyncio.sleep(2)
        await told.say(load(400, 0))
        await told.say(load(401, 0))
        await asyncio.sleep(2)
        freed = [(when, load.pools[0].free) for when, load in told.loads]
        assert freed == [(0.0, 500), (1.1, 497), (2.5, 400), (4.5, 400), (4.6, 401)]

    virtual(work)


def test_one_request_more_matters_where_there_are_few() -> None:
    async def work(told: Told) -> None:
        for running in (2, 3, 30, 31, 33, 34):
            await told.say(replace(BUSY, running_requests=running))
            await asyncio.sleep(0.3)
        await asyncio.sleep(2)
        said = [(when, load.running_requests) for when, load in told.loads]
        assert said == [(0.0, 2), (0.3, 3), (0.6, 30), (1.7, 34)]

    virtual(work)


def test_the_load_of_a_busy_worker_goes_with_a_steps_outputs_five_times_a_second() -> None:
    async def work(told: Told) -> None:
        for step in range(50):  # two seconds; what comes between steps changes the load, too
            await told.say(replace(BUSY, waiting_requests=step % 2), OUTPUT)
            await asyncio.sleep(0.02)
            await told.say(replace(BUSY, waiting_requests=2 + step % 2))
            await asyncio.sleep(0.02)
        _, *others = [step for _, step in told.steps if step.load is not None]
        assert 6 <= len(others) <= 10
        assert all(step.outputs for step in others)
        assert [len(step.outputs) for _, step in told.steps] == [1] * 50

    virtual(work)


def test_a_drain_and_a_refusal_are_told_at_once() -> None:
    async def work(told: Told) -> None:
        refusing = replace(BUSY, peers=(PeerTransport("p-1", refusal="slow"),))
        for load in (IDLE, BUSY, refusing, replace(refusing, draining=True)):
            await told.say(load)
        assert [when for when, _ in told.loads] == [0.0] * 4
        assert told.loads[-1][1].draining
        assert told.steps[2][1].peers == refusing.peers

    virtual(work)


def test_outputs_wait_for_no_load() -> None:
    async def work(told: Told) -> None:
        for number in range(5):
            await told.say(replace(BUSY, running_requests=number + 1), OUTPUT)
            await told.say(None, OUTPUT)
        assert [when for when, _ in told.steps] == [0.0] * 10
        assert [len(step.outputs) for _, step in told.steps] == [1] * 10
        assert len(told.loads) == 1
        await asyncio.sleep(1)
        assert told.loads[-1][1].running_requests == 5

    virtual(work)


def test_peers_are_told_when_they_have_changed() -> None:
    a, b = PeerTransport("a-1", "UCX"), PeerTransport("b-1", "UCX")
    faster = replace(a, read_bytes_per_second=2e9)

    async def work(told: Told) -> None:
        for number, peers in enumerate([(a,), (a, b), (a, b), (faster, b), (b,)]):
            await told.say(WorkerLoad(running_requests=number, peers=peers))
            await asyncio.sleep(1)
        said = [(step.peers, step.gone_peers) for _, step in told.steps]
        assert said == [((a,), ()), ((b,), ()), ((), ()), ((faster,), ()), ((), ("a-1",))]
        assert not any(load.peers for _, load in told.loads)
        second = Told()
        await second.say(WorkerLoad(peers=(b,)))
        assert second.steps[0][1].peers == (b,)
        await second.close()

    virtual(work)


async def test_a_workers_streams_are_paced() -> None:
    server, inbox = worker_server(), Inbox[Any]()
    service = WorkerService("decode-0-1", inbox, SubmitRules(WorkerRole.DECODE, 100, ()))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    async with worker_channel(f"127.0.0.1:{port}", None) as channel, asyncio.timeout(60):
        call: grpc.aio.StreamStreamCall[Any, Any] = worker_pb2_grpc.WorkerServiceStub(
            channel
        ).Attach()
        hello = AttachRequest(AttachHello("router", "decode-0-1", VERSION))
        await call.write(ATTACH_REQUEST.to_message(hello))
        [attach] = await asyncio.to_thread(inbox.take_all)
        assert isinstance(attach, Attach)
        peer = PeerTransport("p-1", "UCX")
        for number in range(1, 20):
            attach.link.deliver(EngineOutputs((), WorkerLoad(number, peers=(peer,))))
        first, last = await call.read(), await call.read()
        assert [said.load.waiting_requests for said in (first, last)] == [1, 19]
        assert [len(said.peers) for said in (first, last)] == [1, 0]
        call.cancel()
    await server.stop(None)
