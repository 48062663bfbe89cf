"""Without tokens a connection is the caller: many calls of one do not keep another waiting."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from kvrelay.router.callers import ANYBODY
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.router.turns import FairTurns
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

from .cluster import Cluster, HeldEncoding, running
from .scripted_worker import until


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The callers of all work that has come, whether or not it waits."""
    begin, callers = FairTurns.begin, list[str]()

    async def noted(
        turns: FairTurns, caller: str, size: int, full: Callable[[], Exception]
    ) -> None:
        callers.append(caller)
        await begin(turns, caller, size, full)

    monkeypatch.setattr(FairTurns, "begin", noted)
    return callers


@asynccontextmanager
async def another(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    """A client on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(cluster.router.grpc_address, options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_texts(cluster: Cluster, held_encoding: HeldEncoding, came: list[str]) -> None:
    async with another(cluster) as modest:
        greedy = [cluster.stub.Tokenize(pb.TokenizeRequest(text=f"a{n}")) for n in range(8)]
        await until(lambda: len(held_encoding.texts) == 2 and len(came) == 8)
        waiting = modest.Tokenize(pb.TokenizeRequest(text="b"))
        await until(lambda: len(came) == 9)
        held_encoding.let_go.set()
        await asyncio.gather(waiting, *greedy)
    assert held_encoding.texts.index("b") <= 4, held_encoding.texts


async def test_histories(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, came: list[str]
) -> None:
    asked: list[str] = []
    gate = asyncio.Event()

    async def held(link: WorkerLink, owner: str, digest: str, seconds: float) -> array[int]:
        asked.append(digest[:3])
        await gate.wait()
        return array("I")

    monkeypatch.setattr(WorkerLink, "find_history", held)

    def request(first: str) -> pb.OpenSessionRequest:
        return pb.OpenSessionRequest(history_digest=f"9-{first}" + "0" * 63)

    async with another(cluster) as modest:
        greedy = [cluster.stub.OpenSession(request("a")) for _ in range(12)]
        await until(lambda: len(asked) == 4 and len(came) == 12)
        waiting = modest.OpenSession(request("b"))
        await until(lambda: len(came) == 13)
        gate.set()
        ended = await asyncio.gather(waiting, *greedy, return_exceptions=True)
    assert asked.index("9-b") <= 6, asked
    assert {one.code() for one in ended if isinstance(one, grpc.aio.AioRpcError)} == {
        grpc.StatusCode.NOT_FOUND
    }


async def test_a_long_list_of_sessions_is_built_in_pieces(config: RouterConfig) -> None:
    async with running(replace(config, max_sessions=500), "prefill-0", "decode-0") as cluster:
        sessions = cluster.router._sessions
        for _ in range(400):
            sessions.open(ANYBODY, pb.OpenSessionRequest(), 402)
        info = ServerInfo(cluster.router._fleet, None, None, sessions)  # type: ignore[arg-type]
        listing, turns = asyncio.create_task(info.sessions(ANYBODY)), 0
        while not listing.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(listing.result()) == 400
        assert turns > 5
