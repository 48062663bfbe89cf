"""Clients that keep sending requests, and the outcome of each request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvrelay.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class Case:
    """A request whose output is the same in every run."""

    prompt: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]


def make_cases(seed: int = 0, count: int = 8) -> list[Case]:
    """Greedy and sampled requests of several lengths; some share the first 90 tokens."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(500) for _ in range(90))
    cases = []
    for number in range(count):
        prompt = tuple(rng.randrange(500) for _ in range(rng.choice((7, 40, 90, 160))))
        sampling: dict[str, Any] = {"max_tokens": rng.randint(16, 48), "ignore_eos": True}
        if number % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        else:
            sampling |= {"temperature": 0.0}
        cases.append(Case(shared + prompt if number % 4 == 3 else prompt, (*sampling.items(),)))
    return cases


@dataclass
class Outcome:
    """How one request ended."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    completed: bool = False
    aborted: bool = False
    status: grpc.StatusCode | None = None
    detail: str = ""
    seconds: float = 0.0


async def ask(
    stub: inference_pb2_grpc.InferenceServiceStub,
    case: Case,
    bound: float,
    abort_after: int | None = None,
    request_id: str = "",
) -> Outcome:
    """Send one request and wait for its end. `abort_after` so many messages it is cancelled."""
    request = inference_pb2.GenerateRequest(request_id=request_id)
    request.input_ids.ids.extend(case.prompt)
    request.sampling_params.CopyFrom(inference_pb2.SamplingParams(**dict(case.sampling)))
    outcome, begun = Outcome(case), time.monotonic()
    call = stub.Generate(request, timeout=bound)
    try:
        left = abort_after
        async for response in call:
            outcome.tokens += response.delta.token_ids
            if response.HasField("complete"):
                outcome.completed = True
            if left is not None:
                left -= 1
                if left <= 0:
                    outcome.aborted = True
                    call.cancel()
                    break
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.detail = error.code(), error.details() or ""
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        outcome.aborted = True
    outcome.seconds = time.monotonic() - begun
    return outcome


class Load:
    """Clients that ask one request after another until they are told to stop.

    Args:
        stub: returns a stub of the router that runs now.
        cases: what they ask, chosen at random.
        bound: seconds after which a request fails.
        aborts: the share of requests whose client cancels early.
    """

    def __init__(
        self,
        stub: Callable[[], Awaitable[inference_pb2_grpc.InferenceServiceStub]],
        cases: Sequence[Case],
        bound: float,
        *,
        seed: int = 0,
        clients: int = 5,
        aborts: float = 0.0,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._stub, self._cases, self._bound, self._aborts = stub, cases, bound, aborts
        self._stopping = False
        self._clients = [
            asyncio.create_task(self._run(random.Random(f"{seed}/{number}")))
            for number in range(clients)
        ]

    async def warm(self, requests: int) -> None:
        """Wait until so many requests have ended."""
        while len(self.outcomes) < requests:
            await asyncio.sleep(0.02)

    async def stop(self) -> list[Outcome]:
        """Send no more, wait for the running requests, and return all outcomes."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        return self.outcomes

    async def _run(self, rng: random.Random) -> None:
        while not self._stopping:
            abort_after = rng.randint(1, 20) if rng.random() < self._aborts else None
            outcome = await ask(
                await self._stub(), rng.choice(self._cases), self._bound, abort_after
            )
            self.outcomes.append(outcome)
            if outcome.status is not None:
                await asyncio.sleep(0.1)  # as a client that is refused does


def check(
    outcomes: Sequence[Outcome], expected: dict[Case, list[int]], *, may_be_lost: bool
) -> list[str]:
    """List what is wrong: wrong tokens, and requests that failed without a reason.

    Args:
        expected: each case's tokens in a run without faults.
        may_be_lost: the router was harmed, so that its requests may end in `UNAVAILABLE`.
    """
    wrong = []
    for outcome in outcomes:
        right = expected[outcome.case]
        if outcome.completed:
            if outcome.tokens != right:
                wrong.append(f"wrong tokens: {outcome.tokens} for {right}")
        elif outcome.tokens != right[: len(outcome.tokens)]:
            wrong.append(f"wrong tokens before its end: {outcome.tokens} for {right}")
        elif not outcome.aborted and not (
            may_be_lost and outcome.status is grpc.StatusCode.UNAVAILABLE
        ):
            wrong.append(f"{outcome.status}: {outcome.detail} after {outcome.seconds:.1f} s")
    return wrong
