"""The examination of a Ray's nodes, with a measurement of every pair; Ray must be initialised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from kvrelay.deploy.examination.examiner import GIVE_UP_SECONDS, Examiner, Reading
from kvrelay.deploy.examination.facts import NodeFacts
from kvrelay.deploy.examination.findings import Node, NodePair
from kvrelay.deploy.nodes.local_ray import NodeAffinitySchedulingStrategy, ray
from kvrelay.deploy.nodes.worker_actor import reason_of
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.version import VERSION

T = TypeVar("T")
_END_SECONDS: Final = 5.0
_CLOCK_ASKS: Final = 5
"""The number of times that a clock is read; the quickest answer counts."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An examiner on a node."""

    name: str
    actor: Any
    is_second: bool = False
    """Whether it is there only to be read from; the node's other examiner looks at the node."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of an examination."""

    model: str | None = None
    """The path of a checkpoint that must be the same on every node."""
    piece_bytes: int = 2 << 20
    """The bytes that one read moves."""
    floor: float = 0.0
    """The least bytes a second; a pair that is read more slowly has failed."""


@contextmanager
def examiners(advertised: Mapping[str, str]) -> Iterator[list[Seat]]:
    """Open a context in which an examiner runs on each node; on a lone node there are two.

    They take nothing that Ray counts, so they run beside workers that have everything. All are gone
    when the context is left.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    placed = ray.remote(Examiner)
    seats: list[Seat] = []
    try:
        for number, node in enumerate(alive * (2 if len(alive) == 1 else 1)):
            is_second = number >= len(alive)
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = placed.options(num_cpus=0, scheduling_strategy=there).remote(advertised)
            seats.append(Seat(f"{name}, again" if is_second else name, actor, is_second))
        yield sorted(seats, key=lambda seat: seat.name)
    finally:
        closing = [seat.actor.close.remote() for seat in seats]
        ray.wait(closing, num_returns=len(closing), timeout=_END_SECONDS)
        for seat in seats:
            ray.kill(seat.actor)


async def examine(
    seats: Sequence[Seat], wanted: Wanted, say: Callable[[str], object] = lambda line: None
) -> tuple[list[Node], list[NodePair]]:
    """Examine the nodes, and measure the pairs; failures are in the results.

    Args:
        seats: the examiners.
        wanted: the examination's parameters.
        say: is called with a line on each next stage.
    """
    say(f"{sum(not seat.is_second for seat in seats)} nodes are examined")
    nodes = await asyncio.gather(*(_examine(seat, wanted) for seat in seats))
    opened = await asyncio.gather(
        *(_open(seat, node, wanted) for seat, node in zip(seats, nodes, strict=True))
    )
    found = [node for _, node in opened]
    open_seats = [
        (seat, description)
        for seat, (description, _) in zip(seats, opened, strict=True)
        if description is not None
    ]
    pairs = await _measure_all(open_seats, say)
    return [node for seat, node in zip(seats, found, strict=True) if not seat.is_second], pairs


async def _examine(seat: Seat, wanted: Wanted) -> Node:
    try:
        await _asked(seat.actor.clock.remote())
        plain = await seat.actor.facts.remote(wanted.model)  # it may read a whole model
        ahead, wrong = await _clock(seat)
    except ray.exceptions.RayError as error:
        return Node(seat.name, error=f"no process of kvrelay runs there: {_why(error)}")
    except TimeoutError:
        text = f"no process of kvrelay has answered there in {GIVE_UP_SECONDS:g} s"
        return Node(seat.name, error=text)
    facts = NodeFacts.read(plain)
    return Node(seat.name, facts=facts, clock_seconds=ahead, clock_error_seconds=wrong)


async def _clock(seat: Seat) -> tuple[float, float]:
    """Return how far a node's clock is ahead of this one's, and the error of that, in seconds."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ASKS):
        asked, begun = time.time(), time.monotonic()
        theirs = await _asked(seat.actor.clock.remote())
        wrong = (time.monotonic() - begun) / 2
        if wrong < best[1]:
            best = (theirs - asked - wrong, wrong)
    return best


async def _open(seat: Seat, node: Node, wanted: Wanted) -> tuple[AgentDescription | None, Node]:
    """Let others read from an examiner; return None if it cannot be read from."""
    if node.error or node.facts.version != VERSION:
        return None, node
    call = seat.actor.open.remote(seat.name, wanted.piece_bytes, wanted.floor)
    try:
        return await _asked(call), node
    except ray.exceptions.RayError as error:
        return None, replace(node, nixl_error=_why(error))
    except TimeoutError:
        return None, replace(node, nixl_error=f"it was not ready in {GIVE_UP_SECONDS:g} s")


async def _measure_all(
    seats: Sequence[tuple[Seat, AgentDescription]], say: Callable[[str], object]
) -> list[NodePair]:
    """Measure each direction of every pair; no node is in two pairs at a time."""
    pairs: list[NodePair] = []
    for number, one_round in enumerate(rounds(len(seats)), start=1):
        say(f"round {number} of pairs: {len(one_round)} at a time")
        for there in (False, True):
            ways = [(b, a) if there else (a, b) for a, b in one_round]
            pairs += await asyncio.gather(*(_measure(seats[a], seats[b]) for a, b in ways))
    return sorted(pairs, key=str)


async def _measure(
    reader: tuple[Seat, AgentDescription], source: tuple[Seat, AgentDescription]
) -> NodePair:
    names = reader[0].name, source[0].name
    try:
        found: Reading = await _asked(reader[0].actor.measure.remote(source[1]))
    except (ray.exceptions.RayError, TimeoutError) as error:
        why = _why(error) or f"no answer in {GIVE_UP_SECONDS:g} s"
        return NodePair(*names, refusal=why)
    return NodePair(*names, found.bytes_per_second, found.backend, found.lanes, found.refusal)


async def _asked(call: Awaitable[T]) -> T:
    async with asyncio.timeout(GIVE_UP_SECONDS):
        return await call


def _why(error: Exception) -> str:
    """Return why a call failed, in one line; empty for a timeout."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return reason_of(error)
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), "")


def rounds(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of `number` nodes once, in rounds as in a round-robin tournament.

    The first one keeps its place, and the others move on by one after each round.
    """
    players = list(range(number + number % 2))
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < number]
        players.insert(1, players.pop())
