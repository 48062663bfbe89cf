"""Clients that have conversations by sessions, and go on with them on another router."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Case, Expected, Outcome, ask

Talk = tuple[Case, ...]
"""A conversation: a case for each turn, whose prompt is the whole conversation up to there."""
_TURNS = 4
_FIRST_TOKENS, _NEW_TOKENS = 120, 40


async def learn_talks(
    chaos: ChaosCluster, count: int = 6, seed: int = 0
) -> tuple[list[Talk], Expected]:
    """So many conversations, and what a cluster without faults says, without a session."""
    rng = random.Random(seed)
    talks: list[Talk] = []
    expected: Expected = {}
    for number in range(count):
        history: tuple[int, ...] = ()
        turns = []
        for turn in range(_TURNS):
            length = _NEW_TOKENS if turn else _FIRST_TOKENS
            new = tuple(rng.randrange(500) for _ in range(length))
            sampling: dict[str, Any] = {"max_tokens": rng.randint(6, 16), "ignore_eos": True}
            if number % 2:
                sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
            else:
                sampling |= {"temperature": 0.0}
            case = Case(history + new, (*sampling.items(),))
            expected |= await chaos.learn([case])
            history = (*case.prompt, *expected[case][0])
            turns.append(case)
        talks.append(tuple(turns))
    return talks, expected


class Talks:
    """Clients that have one conversation after another until they are told to stop.

    When their router is lost, they open the session anew on another one, with the digest of its
    history or, if nobody has that history, with its tokens, and say the turn again.

    Args:
        stub: returns a stub of the router that runs now.
        talks: what they say, chosen at random.
        bound: seconds after which a turn fails.
    """

    def __init__(
        self,
        stub: Callable[[], Awaitable[inference_pb2_grpc.InferenceServiceStub]],
        talks: Sequence[Talk],
        bound: float,
        *,
        clients: int = 5,
    ) -> None:
        self.outcomes: list[Outcome] = []
        """Of turns."""
        self.adopted = 0
        """Sessions that were opened by the digest of their history."""
        self._stub, self._talks, self._bound = stub, talks, bound
        self._stopping = False
        self._clients = [
            asyncio.create_task(self._run(random.Random(number))) for number in range(clients)
        ]

    async def warm(self, turns: int) -> None:
        """Wait until so many turns have ended."""
        while len(self.outcomes) < turns:
            await asyncio.sleep(0.02)

    async def stop(self) -> list[Outcome]:
        """Say no more, wait for the running turns, close the sessions; returns all outcomes."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        return self.outcomes

    async def _run(self, rng: random.Random) -> None:
        while not self._stopping:
            await self._talk(rng.choice(self._talks))

    async def _talk(self, talk: Talk) -> None:
        name, number, history, digest = uuid.uuid4().hex, 0, 0, ""
        stub = await self._open(name, talk[0], 0)
        while number < len(talk) and not self._stopping:
            case = talk[number]
            outcome = await ask(stub, case, self._bound, session_id=name, known=history)
            self.outcomes.append(outcome)
            if outcome.completed:
                number, history = number + 1, len(case.prompt) + len(outcome.tokens[0])
                digest = outcome.history_digest
            else:
                stub = await self._open(name, case, history, digest)
        await self._close(stub, name)

    async def _open(self, name: str, case: Case, history: int, digest: str = "") -> Any:
        """A session with the first tokens of a case, on the router that runs; returns its stub."""
        tokens, ends = pb.TokenIds(ids=case.prompt[:history]), time.monotonic() + self._bound
        while True:
            assert time.monotonic() < ends, "no router opens the session"
            stub = await self._stub()
            request = pb.OpenSessionRequest(session_id=name, history_digest=digest)
            if not digest:
                request.history.CopyFrom(tokens)
            try:
                answer = await stub.OpenSession(request, timeout=self._bound)
                assert answer.tokens == history
                self.adopted += bool(digest)
                return stub
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                    return stub
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    await asyncio.sleep(0.1)  # the router was lost, or a worker
                elif digest and error.code() is grpc.StatusCode.NOT_FOUND:
                    digest = ""
                else:
                    raise

    async def _close(self, stub: Any, name: str) -> None:
        try:
            await stub.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=self._bound)
        except grpc.aio.AioRpcError as error:
            lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
            if error.code() not in lost:
                raise
