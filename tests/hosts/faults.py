"""What can happen to a host or to a link of a cluster that serves, and what must not follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

from tests.chaos.load import Expected, Load, Outcome, check
from tests.hosts.host import Host
from tests.hosts.served_hosts import ServedHosts

PAUSE_S = 20.0
CUT_S = 18.0
"""Longer than a worker's lease lasts, so that its death is believed."""
CLEAR = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How a request may end that is not served."""


class Harm(StrEnum):
    """What is done."""

    KILL = "kill host"
    PAUSE = "pause host"
    PAUSE_AND_CUT = "pause host, cut it off, heal, wake"
    CUT_PEER = "cut P ↔ D"
    CUT_CONTROLLER = "cut controller"
    CUT_ROUTER = "cut router"


class Way(StrEnum):
    """Which messages are lost when a link is cut."""

    BOTH = "both ways"
    SENT = "what it sends"
    RECEIVED = "what is sent to it"


SURVIVED = {Harm.CUT_PEER, Harm.CUT_ROUTER}
"""What ends no worker; all else lets the victim's lease run out."""
OTHER_END = {Harm.CUT_CONTROLLER: "controller", Harm.CUT_ROUTER: "router"}
PEERS = {"P": "D", "D": "P"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment."""

    harm: Harm
    victim: str
    """Whose host, or link: `P` or `D`."""
    way: Way = Way.BOTH

    def __str__(self) -> str:
        return f"{self.harm}, {self.victim}" + (f", {self.way}" if self.cuts else "")

    @property
    def cuts(self) -> bool:
        """Whether it is one link that is harmed."""
        return self.harm in OTHER_END or self.harm is Harm.CUT_PEER

    @property
    def other_end(self) -> str:
        """Of the link that is cut."""
        return OTHER_END.get(self.harm, PEERS[self.victim])


CELLS = (
    Cell(Harm.PAUSE, "P"),
    Cell(Harm.PAUSE_AND_CUT, "P"),
    Cell(Harm.PAUSE, "D"),
    *(Cell(Harm.CUT_PEER, "P", way) for way in Way),
    *(Cell(Harm.CUT_ROUTER, "P", way) for way in Way),
    *(Cell(Harm.CUT_ROUTER, "D", way) for way in Way),
    *(Cell(Harm.CUT_CONTROLLER, "P", way) for way in Way),
    *(Cell(Harm.CUT_CONTROLLER, "D", way) for way in Way),
    Cell(Harm.KILL, "P"),
    Cell(Harm.KILL, "D"),
)


@dataclass
class Report:
    """The result of a cell."""

    cell: Cell
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    refused: int = 0
    """Requests that ended with a clear status in place of a completion."""
    slowest: float = 0.0
    """Seconds of the request that took longest."""
    recovered: float = 0.0
    """Seconds from the end of the harm until both workers serve, and all pages are back."""


async def experiment(chaos: ServedHosts, cell: Cell, expected: Expected) -> Report:
    """Do the harm under load, undo it, wait until all is as before, and say what is wrong."""
    report = Report(cell)
    bound = chaos.bound + PAUSE_S
    load = Load(chaos.current, list(expected), bound, clients=4)
    before = await chaos.incarnations()
    try:
        async with asyncio.timeout(bound):
            await load.warm(6)
        await _harm(chaos, cell)
    except Exception as error:  # the other cells are run all the same
        report.problems.append(f"{type(error).__name__}: {error}")
    healed = time.monotonic()
    outcomes = await load.stop()
    report.problems += check_ends(outcomes, expected)
    try:
        await chaos.until_at_rest()
        report.recovered = time.monotonic() - healed
        report.problems += _changed(cell, before, await chaos.incarnations())
        report.problems += await _probe(chaos, expected)
        await chaos.until_at_rest()
    except Exception as error:
        report.problems.append(f"{type(error).__name__}: {error}")
    report.requests = len(outcomes)
    report.refused = sum(not outcome.completed for outcome in outcomes)
    report.slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    return report


def _changed(cell: Cell, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """List workers that were replaced, or were not, in place of what had to become of them."""
    dies = "" if cell.harm in SURVIVED else {"P": "prefill-0", "D": "decode-0"}[cell.victim]
    return [
        f"{name} was {'not ' if name == dies else ''}replaced"
        for name, incarnation in before.items()
        if (after.get(name) != incarnation) is not (name == dies)
    ]


def check_ends(outcomes: list[Outcome], expected: Expected) -> list[str]:
    """List wrong tokens, and ends that are neither a completion nor a clear status."""
    clear = [outcome for outcome in outcomes if outcome.status in CLEAR]
    rest = [outcome for outcome in outcomes if outcome.status not in CLEAR]
    for outcome in clear:
        outcome.status = grpc.StatusCode.UNAVAILABLE
    return check(clear, expected, may_be_lost=True) + check(rest, expected, may_be_lost=False)


async def _probe(chaos: ServedHosts, expected: Expected) -> list[str]:
    load = Load(chaos.current, list(expected), chaos.bound, seed=1, clients=4)
    await load.warm(1)
    return check(await load.stop(), expected, may_be_lost=False)


async def _harm(chaos: ServedHosts, cell: Cell) -> None:
    host = chaos.hosts[cell.victim]
    match cell.harm:
        case Harm.KILL:
            await asyncio.to_thread(host.kill)
            await asyncio.to_thread(chaos.replace_host, cell.victim)
        case Harm.PAUSE:
            await _pause(host)
        case Harm.PAUSE_AND_CUT:
            await _pause_and_cut(chaos, cell)
        case _:
            await _cut(chaos, cell)


async def _pause(host: Host) -> None:
    await asyncio.to_thread(host.pause)
    await asyncio.sleep(PAUSE_S)
    await asyncio.to_thread(host.wake)


async def _pause_and_cut(chaos: ServedHosts, cell: Cell) -> None:
    """Its bytes are in flight when its death is believed, and arrive afterwards."""
    host, others = chaos.hosts[cell.victim], set(chaos.hosts.values())
    await asyncio.to_thread(host.pause)
    for other in others - {host}:
        chaos.network.cut_both_ways(host, other)
    await asyncio.sleep(PAUSE_S)
    for other in others - {host}:
        chaos.network.heal_both_ways(host, other)
    await asyncio.sleep(1)
    await asyncio.to_thread(host.wake)


async def _cut(chaos: ServedHosts, cell: Cell) -> None:
    for sender, receiver in _lost(chaos, cell):
        chaos.network.cut(sender, receiver)
    await asyncio.sleep(CUT_S)
    for sender, receiver in _lost(chaos, cell):
        chaos.network.heal(sender, receiver)


def _lost(chaos: ServedHosts, cell: Cell) -> Iterator[tuple[Host, Host]]:
    """Senders and receivers between whom messages are lost."""
    host, other = chaos.hosts[cell.victim], chaos.hosts[cell.other_end]
    if cell.way is not Way.RECEIVED:
        yield host, other
    if cell.way is not Way.SENT:
        yield other, host
