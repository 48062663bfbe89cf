"""Sessions on real workers: over gRPC and NIXL, tokens as without a session, and by a kill."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.router.config import PlacementMode
from kvrelay.v1 import inference_pb2 as pb
from tests.checkpoints import VOCAB_SIZE
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster, running
from tests.pairwise import few

SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 20, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "pair": {"placement": PlacementMode.DISAGGREGATED},
    "adaptive": {"placement": PlacementMode.ADAPTIVE},
    "aggregated": {"prefill": 0, "decode": 0, "aggregated": 1},
}


def some_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


FIRST = some_tokens(0, 50)
NEW = [some_tokens(seed, 7 + 12 * seed) for seed in range(1, 5)]


def sampling_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among a turn's fields, and the others as they are here."""
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    return SAMPLING | {name: value for name, value in fields.items() if name in known}


class Chat:
    """A session, and its history as its client knows it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.tokens: list[int] = []

    async def open(self, **fields: Any) -> Chat:
        await self.cluster.stub.OpenSession(pb.OpenSessionRequest(session_id=self.name, **fields))
        return self

    def turn(self, new: Iterable[int], **fields: Any) -> Any:
        sampling = sampling_of(fields)
        fields = {name: value for name, value in fields.items() if name not in sampling}
        return self.cluster.stub.Generate(
            pb.GenerateRequest(
                input_ids=pb.TokenIds(ids=new),
                session_id=self.name,
                sampling_params=pb.SamplingParams(**sampling),
                **fields,
            )
        )

    async def say(self, new: list[int], **fields: Any) -> pb.GenerateComplete:
        """One turn; its tokens are those of the whole conversation as a request of its own."""
        output: list[int] = []
        complete = pb.GenerateComplete()
        async for response in self.turn(new, **fields):
            output += response.delta.token_ids
            if response.HasField("complete"):
                complete = response.complete
        kept = self.tokens[: fields.get("rewind_to")]
        prompt = [*kept, *new]
        plain = await self.cluster.generate(prompt, **sampling_of(fields))
        assert output == plain.tokens
        self.tokens = [*prompt, *output]
        return complete

    async def close(self) -> None:
        await self.cluster.stub.CloseSession(pb.CloseSessionRequest(session_id=self.name))

    async def state(self) -> pb.SessionState:
        sessions: list[pb.SessionState]
        sessions = (await self.cluster.stub.GetSessions(pb.GetSessionsRequest())).sessions
        return next(one for one in sessions if one.session_id == self.name)


async def resumed(cluster: Cluster) -> float:
    return await cluster.metric("kvrelay_session_turns_total", start="resumed")


async def session_rows(cluster: Cluster) -> float:
    return await cluster.metric("kvrelay_pages", pool="rows", state="session")


@few(1)
@pytest.mark.parametrize("kind", KINDS)
async def test_turns_have_the_tokens_of_the_whole_conversation(tiny: Path, kind: str) -> None:
    async with in_process(tiny, chunk_tokens=32, kv_memory=8 << 20, **KINDS[kind]) as cluster:
        chat = await Chat(cluster, "chat").open()
        await chat.say(FIRST)
        for number, new in enumerate(NEW, 1):
            history = len(chat.tokens)
            complete = await chat.say(new)
            assert await resumed(cluster) == number
            if kind == "aggregated":
                assert complete.usage.cached_tokens == history - 1
            assert complete.usage.prompt_tokens == history + len(new)
        await chat.say(NEW[0], rewind_to=60)
        assert await session_rows(cluster) == 1
        await chat.close()
        await cluster.assert_at_baseline()


@few(1)
@pytest.mark.parametrize("kind", KINDS)
async def test_scenario_18_19_20_21_an_abort_a_queued_turn_and_a_close(
    tiny: Path, kind: str
) -> None:
    async with in_process(tiny, chunk_tokens=32, kv_memory=8 << 20, **KINDS[kind]) as cluster:
        chat = await Chat(cluster, "chat").open()
        await chat.say(FIRST)
        # 18: a later turn is aborted in its middle.
        running_turn = chat.turn(NEW[2], max_tokens=400)
        await first_tokens(running_turn)
        running_turn.cancel()
        await until_idle(chat)
        assert (await chat.state()).tokens == len(chat.tokens)
        await chat.say(NEW[0])
        # 19: a second turn waits, and is cancelled before it starts.
        running_turn = chat.turn(NEW[1], max_tokens=300)
        await first_tokens(running_turn)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first_tokens(chat.turn([5]))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        waiting = chat.turn([5], queue_turn=True)
        while not (await chat.state()).waiting_turns:
            await asyncio.sleep(0.01)
        waiting.cancel()
        assert await session_rows(cluster) == 0, "21: it is lent, and counted once"
        # 20: closed while its turn decodes.
        await chat.close()
        tokens = [token async for one in running_turn for token in one.delta.token_ids]
        assert tokens
        await cluster.assert_at_baseline()


async def first_tokens(call: Any) -> None:
    while not (await anext(aiter(call))).delta.token_ids:
        pass


async def until_idle(chat: Chat) -> None:
    async with asyncio.timeout(60):
        while (await chat.state()).running:
            await asyncio.sleep(0.01)


async def talk_at_once(cluster: Cluster, sessions: int) -> None:
    """So many conversations of four turns."""
    chats = [await Chat(cluster, str(name)).open() for name in range(sessions)]

    async def talk(chat: Chat) -> None:
        await chat.say(FIRST)
        for new in NEW[:3]:
            await chat.say(new)
        await chat.close()

    await asyncio.gather(*map(talk, chats))


@pytest.mark.slow  # `tests/engine` has it in virtual time
async def test_scenario_17_sessions_in_too_little_memory(tiny: Path) -> None:
    """Twelve conversations at once where three fit: turns wait, sessions end, tokens are right."""
    async with in_process(
        tiny, chunk_tokens=32, kv_memory=1 << 20, placement=PlacementMode.ADAPTIVE
    ) as cluster:
        await talk_at_once(cluster, 12)
        await cluster.assert_at_baseline()


@pytest.mark.slow  # in `make test` tests/engine/test_session_matrix.py has workers die
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(180)
async def test_a_lost_worker_costs_a_computation_and_never_the_session(ray, tiny: Path) -> None:
    """Killed between two turns, and in the middle of one."""
    async with running(
        tiny,
        dtype="float32",
        chunk_tokens=64,
        kv_memory=8 << 20,
        decode=2,
        placement=PlacementMode.ADAPTIVE,
    ) as cluster:
        chat = await Chat(cluster, "chat").open()
        await chat.say(FIRST)
        for when in ("between turns", "in a turn"):
            home = (await chat.state()).worker
            said = asyncio.create_task(chat.say(NEW[1])) if when == "in a turn" else None
            if said:
                await asyncio.sleep(0.05)
            os.kill(cluster.deployment.cluster.workers[home].pid, signal.SIGKILL)
            await (said or chat.say(NEW[1]))
            await chat.say(NEW[0])
        await chat.close()
        await cluster.assert_at_baseline()


async def all_ready(cluster: Cluster) -> bool:
    workers = await cluster.status()
    return len(workers) == 3 and all(worker.ready for worker in workers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.timeout(600)
async def test_1000_turns_of_100_sessions_with_kills(ray, tiny: Path) -> None:
    """In too little memory for all; a decode worker is killed every so many turns."""
    async with running(
        tiny,
        dtype="float32",
        chunk_tokens=64,
        kv_memory=2 << 20,
        decode=2,
        placement=PlacementMode.ADAPTIVE,
    ) as cluster:
        chats = [await Chat(cluster, str(name)).open() for name in range(100)]
        rng, ended, kills, allowed = random.Random(0), 0, 0, 100

        async def talk(chat: Chat) -> None:
            nonlocal ended
            for turn in range(10):
                while ended >= allowed:
                    await asyncio.sleep(0.05)
                await chat.say(some_tokens(turn, 5 + turn), max_tokens=8)
                ended += 1
            await chat.close()

        async def kill_often() -> None:
            """Turns wait until a killed worker is back; the next kill is in their middle."""
            nonlocal kills, allowed
            for target in (100, 300, 500, 700, 900):
                while ended < target or not await all_ready(cluster):
                    await asyncio.sleep(0.05)
                allowed = target + 200
                while ended < target + 20:
                    await asyncio.sleep(0.01)
                victim = rng.choice(["decode-0", "decode-1"])
                os.kill(cluster.deployment.cluster.workers[victim].pid, signal.SIGKILL)
                kills += 1

        slots = asyncio.Semaphore(16)

        async def in_turn(chat: Chat) -> None:
            async with slots:
                await talk(chat)

        await asyncio.gather(kill_often(), *map(in_turn, chats))
        assert (ended, kills) == (1000, 5)
        assert await resumed(cluster) > 0
        await cluster.assert_at_baseline()
