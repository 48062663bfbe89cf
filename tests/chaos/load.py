"""Clients that keep sending requests, and the outcome of each request."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc

from kvrelay.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True)
class Case:
    """A request whose output is the same in every run."""

    prompt: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]
    form: tuple[str, str] | None = None
    """The kind of the structured output, and the form itself; None: there is none."""

    @property
    def thinks(self) -> bool:
        """Whether the output begins with reasoning, which has a budget."""
        return "thinking_token_budget" in dict(self.sampling)

    @property
    def choices(self) -> int:
        """Outputs that it asks for."""
        return int(dict(self.sampling).get("n", 1))


SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-z ]{20}$"}, '
    '"sizes": {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 3, '
    '"maxItems": 9}}, "required": ["name", "sizes"], "additionalProperties": false}'
)
CALLS = (
    r'start: call ("\n" call)?'
    "\n"
    r'call: "<tool_call>\n{\"name\": \"count\", \"arguments\": " object "}\n</tool_call>"'
    "\n"
    'object: %json {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, '
    '"required": ["n"], "additionalProperties": false}'
)
"""Calls of a tool, in the form of Hermes."""
_FORMS = {2: ("json_schema", SCHEMA), 5: ("grammar", CALLS)}
_BUDGETS = {2: 5, 5: 9, 7: 3}
"""The forms, and the tokens of reasoning before them, by the number of a case among eight."""
REASONING = inference_pb2.Reasoning(begun=True, ends=["</think>"])
Expected = dict[Case, list[list[int]]]
"""The tokens of each choice of each case, in a run without faults."""


class When(Enum):
    """When a client aborts its request by a call."""

    BEFORE = auto()
    """There is no such request yet: that changes nothing."""
    DURING = auto()
    AFTER = auto()
    """It has ended: that changes nothing."""


@dataclass(frozen=True)
class Abort:
    """What a client does to a request of its own."""

    after_messages: int
    """Of its stream, before it leaves, or aborts."""
    when: When | None = None
    """None: it leaves without a word."""


def random_abort(rng: random.Random) -> Abort:
    """Half of them leave, half call `Abort`."""
    when = rng.choice([None, None, None, When.BEFORE, When.DURING, When.AFTER])
    return Abort(rng.randint(1, 20), when)


def make_cases(
    seed: int = 0, count: int = 8, *, vocab_size: int = 500, most_choices: int = 1
) -> list[Case]:
    """Greedy and sampled requests of several lengths; some share the first 90 tokens.

    Some reason before a form, before calls, or before free text.
    """
    rng = random.Random(seed)
    shared = tuple(rng.randrange(vocab_size) for _ in range(90))
    cases = []
    for number in range(count):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.choice((7, 40, 90, 160))))
        sampling: dict[str, Any] = {"max_tokens": rng.randint(16, 48), "ignore_eos": True}
        if number % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        else:
            sampling |= {"temperature": 0.0}
        if most_choices > 1:
            sampling |= {"n": rng.randint(1, most_choices)}
        form, budget = _FORMS.get(number % 8), _BUDGETS.get(number % 8)
        if form is not None:
            del sampling["ignore_eos"]
            sampling["max_tokens"] += 70
        if budget is not None:
            sampling |= {"thinking_token_budget": budget}
        whole = shared + prompt if number % 4 == 3 else prompt
        cases.append(Case(whole, (*sampling.items(),), form))
    return cases


@dataclass
class Outcome:
    """How one request ended."""

    case: Case
    tokens: list[list[int]] = field(init=False)
    """Of each choice."""
    completed: bool = False
    aborted: bool = False
    status: grpc.StatusCode | None = None
    detail: str = ""
    seconds: float = 0.0
    history_digest: str = ""
    """Of the session's history, if it is a turn that has completed."""

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.case.choices)]


async def ask(
    stub: inference_pb2_grpc.InferenceServiceStub,
    case: Case,
    bound: float,
    abort: Abort | None = None,
    request_id: str = "",
    *,
    session_id: str = "",
    known: int = 0,
) -> Outcome:
    """Send one request and wait for its end, or for that of its client's patience.

    Of a session's turn the first `known` tokens of the prompt are its history.
    """
    request = inference_pb2.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex, session_id=session_id
    )
    request.input_ids.ids.extend(case.prompt[known:])
    request.sampling_params.CopyFrom(inference_pb2.SamplingParams(**dict(case.sampling)))
    if case.form is not None:
        setattr(request.sampling_params.structured_output, *case.form)
    if case.thinks:
        request.sampling_params.reasoning.CopyFrom(REASONING)
    outcome, begun = Outcome(case), time.monotonic()
    by_id = inference_pb2.AbortRequest(request_id=request.request_id)
    when = abort.when if abort is not None else None
    call = None
    try:
        if when is When.BEFORE:
            assert not (await stub.Abort(by_id)).aborted, "nobody has asked for it yet"
        call = stub.Generate(request, timeout=bound)
        ends = abort is not None and when in (None, When.DURING)
        messages = 0
        async for response in call:
            messages += 1
            if response.HasField("complete"):
                outcome.completed = not outcome.aborted
                outcome.history_digest = response.complete.history_digest
                continue
            outcome.tokens[response.delta.choice] += response.delta.token_ids
            if ends and abort is not None and messages == abort.after_messages:
                outcome.aborted = True
                if when is None:
                    call.cancel()
                    break
                await stub.Abort(by_id)  # false if it has just ended
        if when is When.AFTER:
            assert not (await stub.Abort(by_id)).aborted, "it has ended"
    except grpc.aio.AioRpcError as error:
        outcome.status, outcome.detail = error.code(), error.details() or ""
    except asyncio.CancelledError:
        if call is None or not call.cancelled():
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
        aborts: the share of requests whose client leaves early, or calls `Abort` at some time.
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
            abort = random_abort(rng) if rng.random() < self._aborts else None
            outcome = await ask(await self._stub(), rng.choice(self._cases), self._bound, abort)
            self.outcomes.append(outcome)
            if outcome.status is not None:
                await asyncio.sleep(0.1)  # as a client that is refused does


def check(outcomes: Sequence[Outcome], expected: Expected, *, may_be_lost: bool) -> list[str]:
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
        elif any(
            said != whole[: len(said)] for said, whole in zip(outcome.tokens, right, strict=True)
        ):
            wrong.append(f"wrong tokens before its end: {outcome.tokens} for {right}")
        elif not outcome.aborted and not (
            may_be_lost and outcome.status is grpc.StatusCode.UNAVAILABLE
        ):
            wrong.append(f"{outcome.status}: {outcome.detail} after {outcome.seconds:.1f} s")
    return wrong
