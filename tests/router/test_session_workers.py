"""Sessions at the router: where they go, and what workers are told of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc

from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.sessions import Sessions
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from .cluster import Cluster, running, status_of
from .scripted_worker import load, until
from .session_calls import opened, said, state, submits, turn


async def test_prefill_workers_hear_nothing_of_sessions(cluster: Cluster) -> None:
    cluster.count()
    await opened(cluster)
    await said(cluster, 1, 2, 3)
    assert cluster.decode.submits[0].HasField("session")
    assert not cluster.prefill.submits[0].HasField("session")


async def test_what_a_prefill_worker_reads_of_a_session_is_not_in_its_queue(
    config: RouterConfig,
) -> None:
    """Its turns would seem longer than they are, and so to be computed after others."""
    adaptive = replace(config, placement=PlacementMode.ADAPTIVE)
    async with running(adaptive, "prefill-0", "decode-0") as cluster:
        cluster.count()
        await opened(cluster)
        await said(cluster, *range(1, 41))
        assert cluster.prefill.submits == []
        speeds = pb.StepSpeeds(
            seconds_per_step=0.01, seconds_per_token=0.001, prompts_known=True, rows_known=True
        )
        peer = pb.PeerTransfer(
            incarnation=cluster.prefill.incarnation, lent_tokens_per_second=1_000_000
        )
        busy = load()
        busy.MergeFrom(pb.WorkerLoad(running_requests=8, growth_tokens=800, speeds=speeds))
        cluster.decode.send(worker_pb2.AttachResponse(load=busy, peers=[peer]))
        links = cluster.router._fleet.links
        await until(lambda: any(link.load.running_requests == 8 for link in links))
        await said(cluster, *range(50, 60))
        [submit] = cluster.prefill.submits
        assert (len(submit.input_ids), submit.cached_tokens) == (52, 41)


async def test_a_lost_worker_costs_a_computation_and_never_the_session(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    await home.stop()
    await pairs.until_lost(home.name)
    await said(pairs, 10)
    assert list(submits(pairs)[1].input_ids) == [1, 2, 3, 4, 5, 10]
    assert submits(pairs)[1].cached_tokens == 0
    assert (await state(pairs)).worker != home.name


async def test_a_worker_that_has_given_a_session_up_is_expected_to_have_nothing(
    pairs: Cluster,
) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    name = home.submits[0].session.session
    home.send(worker_pb2.AttachResponse(ended_sessions=[name]))
    while (await state(pairs)).kept_tokens:
        await asyncio.sleep(0.005)
    await said(pairs, 10)
    assert submits(pairs)[1].cached_tokens == 0


async def test_workers_are_told_to_forget(pairs: Cluster) -> None:
    """What is closed, and what goes on elsewhere."""
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    [other] = [worker for worker in pairs.workers if worker is not home]
    home.send(worker_pb2.AttachResponse(load=full_load()))
    await until(lambda: all(link.load.pools for link in pairs.router._fleet.links))
    await until(lambda: any(link.load.room_tokens == 0 for link in pairs.router._fleet.links))
    await said(pairs, 10)
    assert len(other.submits) == 1, "the first one is full"
    name = home.submits[0].session.session
    await until(lambda: home.forgotten == [name])
    await pairs.stub.CloseSession(pb.CloseSessionRequest(session_id="chat"))
    await until(lambda: other.forgotten == [name])
    error = await status_of(turn(pairs, 1))
    assert error.code() == grpc.StatusCode.NOT_FOUND


def full_load() -> pb.WorkerLoad:
    pool = pb.PoolState(pool="full", page_size=16, total=64, held=64)
    return pb.WorkerLoad(pools=[pool])


async def test_a_lost_stream_takes_the_kept_tokens_with_it(pairs: Cluster) -> None:
    await opened(pairs)
    await said(pairs, 1, 2, 3)
    [home] = [worker for worker in pairs.workers if worker.submits]
    home.break_stream()
    await until(lambda: not all(link.ready for link in pairs.router._fleet.links))
    await until(lambda: all(link.ready for link in pairs.router._fleet.links))
    assert ((await state(pairs)).kept_tokens, (await state(pairs)).worker) == (0, "")
    await said(pairs, 10)
    assert submits(pairs)[1].cached_tokens == 0


def test_a_worker_that_had_a_turn_which_was_given_up_is_told_to_forget(
    config: RouterConfig,
) -> None:
    """It may have finished the turn, and kept it, before it heard that nobody wants it."""
    told: list[tuple[str, str]] = []
    sessions = Sessions(config, RouterMetrics("counter"), lambda *call: told.append(call))
    session = sessions.open(ANYBODY, pb.OpenSessionRequest(session_id="chat"), 402)
    for tokens, worker in ((None, "b"), ([1, 2, 3], "c"), (None, "c"), (None, "")):
        turn = sessions.begin_if_free(ANYBODY, "chat")
        assert turn is not None
        turn.end(tokens, worker)
    assert told == [("b", session.name)], "c keeps the session"
