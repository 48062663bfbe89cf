"""Runs one cell of the fault matrix. The cells share a cluster, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from kvrelay.engine.faults import Fault, FaultAction
from kvrelay.engine.phases import Phase
from kvrelay.router.errors import CannotDrain
from kvrelay.wire.worker_info import WorkerInfo
from tests.chaos.cells import (
    ALONE_PHASES,
    BAD,
    FORWARD_FAULTS,
    MESSAGE_ACTIONS,
    SURVIVED,
    Cell,
    Harm,
    Victim,
)
from tests.chaos.cluster import ChaosCluster, is_gone, samples, wake
from tests.chaos.load import Case, Expected, Load, Outcome, ask, check
from tests.chaos.talks import Talk, Talks

STOP_S = 5.0
DELAY_S = 1.0
SEEN_BY_ITSELF = {
    Victim.PREFILL: (
        Phase.QUEUED,
        Phase.PREFILLING,
        Phase.DRAINING,
        Phase.BORROWING,
        Phase.PREFETCHING,
        Phase.WRITING_BACK,
    ),
    Victim.DECODE: (
        Phase.QUEUED,
        Phase.PULLING,
        Phase.PULLED,
        Phase.DECODING,
        Phase.RETRACTED,
        Phase.DRAINING,
        Phase.SAVING,
        Phase.BORROWING,
        Phase.WRITING_BACK,
    ),
    Victim.DECODE_ALONE: (
        *ALONE_PHASES,
        Phase.SAVING,
        Phase.PREFETCHING,
        Phase.WRITING_BACK,
    ),
}
"""Phases that a worker enters itself: the others are seen by a worker of the other role."""
PREFILL_SEES = (Phase.QUEUED, Phase.PREFILLING, Phase.PREFETCHING)
"""Phases that the prefill worker sees; the decode worker sees the others."""


@dataclass
class Report:
    """The result of a cell."""

    cell: Cell
    problems: list[str] = field(default_factory=list)
    requests: int = 0
    lost: int = 0
    """Requests that ended without a completion, where that may be."""
    slowest: float = 0.0
    """Seconds of the request that took longest."""
    seconds: float = 0.0
    """Of the experiment."""


async def experiment(
    chaos: ChaosCluster,
    cell: Cell,
    expected: Expected,
    *,
    talks: Sequence[Talk] = (),
    stop_s: float = STOP_S,
) -> Report:
    """Do the harm under load, wait until the cluster has recovered, and report what was wrong.

    The load is of `talks`, if there are any, else of single requests.
    """
    report, begun = Report(cell), time.monotonic()
    current, bound = chaos.router.current, chaos.bound
    load: Load | Talks = (
        Talks(current, talks, bound) if talks else Load(current, [*expected], bound)
    )
    problems, before = report.problems, dict(chaos.cluster.workers)
    try:
        await load.warm(3)
        problems += await _harm(chaos, cell, expected, stop_s)
    except Exception as error:  # the other cells are run all the same
        problems.append(f"{type(error).__name__}: {error}")
    outcomes = await load.stop()
    if isinstance(load, Talks) and cell.victim is Victim.ROUTER and not load.adopted:
        problems.append("no session was adopted by its digest")
    problems += check(outcomes, expected, may_be_lost=cell.victim is Victim.ROUTER)
    problems += _changed(chaos, cell, before)
    try:
        await chaos.until_at_rest()
        problems += await _probe(chaos, expected)
        await chaos.until_at_rest()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    _count(report, outcomes)
    report.seconds = time.monotonic() - begun
    return report


def _count(report: Report, outcomes: list[Outcome]) -> None:
    report.requests = len(outcomes)
    report.lost = sum(not outcome.completed for outcome in outcomes)
    report.slowest = max(outcome.seconds for outcome in outcomes)


def _changed(chaos: ChaosCluster, cell: Cell, before: dict[str, WorkerInfo]) -> list[str]:
    """Workers that were replaced although nothing was done to them."""
    victims = _victim_names(cell)
    return [
        f"{name} was replaced"
        for name, info in before.items()
        if name not in victims and chaos.cluster.workers.get(name) != info
    ]


def _victim_names(cell: Cell) -> tuple[str, ...]:
    if cell.victim is Victim.ROUTER or cell.harm in MESSAGE_ACTIONS or cell.harm in SURVIVED:
        return ()
    if cell.harm is Harm.STOP and cell.phase is not Phase.DRAINING:
        return ()
    return (_victim_name(cell),)


def _victim_name(cell: Cell) -> str:
    number = 1 if cell.harm is Harm.RESTART else 0
    return f"{'prefill' if cell.victim is Victim.PREFILL else 'decode'}-{number}"


async def _probe(chaos: ChaosCluster, expected: Expected) -> list[str]:
    """Send eight requests at once, twice as many as there are pairs of workers."""
    load = Load(chaos.router.current, list(expected), chaos.bound, seed=1, clients=8)
    await load.warm(1)
    return check(await load.stop(), expected, may_be_lost=False)


async def _harm(chaos: ChaosCluster, cell: Cell, expected: Expected, stop_s: float) -> list[str]:
    if cell.harm in MESSAGE_ACTIONS:
        return await _harm_message(chaos, cell)
    if cell.harm in FORWARD_FAULTS:
        return await _harm_forward(chaos, cell, expected)
    if cell.victim is Victim.ROUTER:
        return await _harm_router(chaos, cell, stop_s)
    return await _harm_worker(chaos, cell, stop_s)


async def _harm_message(chaos: ChaosCluster, cell: Cell) -> list[str]:
    assert cell.event is not None
    name = _victim_name(cell)
    await chaos.arm(name, Fault(MESSAGE_ACTIONS[cell.harm], cell.event, seconds=DELAY_S))
    await chaos.until_fired(name, ())
    return []


async def _harm_forward(chaos: ChaosCluster, cell: Cell, expected: Expected) -> list[str]:
    before = chaos.worker(_victim_name(cell))
    fault = FORWARD_FAULTS[cell.harm]
    if cell.harm is Harm.FAIL_REQUEST:
        return await _ask_for_the_bad_one(chaos, cell, fault, next(iter(expected)))
    await chaos.arm(before.name, fault)
    await chaos.until_fired(before.name, (before.pid,))
    if cell.harm in SURVIVED:
        return []
    await chaos.until_replaced(before)
    return [] if is_gone(before.pid) else [f"{before.incarnation} still runs"]


async def _ask_for_the_bad_one(
    chaos: ChaosCluster, cell: Cell, fault: Fault, case: Case
) -> list[str]:
    """Send a request that breaks every forward, on whichever worker; it alone is to fail."""
    first = _victim_name(cell)
    names = [name for name in chaos.cluster.workers if name[:-1] == first[:-1]]
    for name in names:
        await chaos.arm(name, fault)
    outcome = await ask(chaos.router.stub, case, chaos.bound, request_id=BAD)
    for name in names:
        await chaos.arm(name)
    blamed = outcome.status is grpc.StatusCode.INTERNAL
    return [] if blamed else [f"the bad request: {outcome.status} {outcome.detail}"]


async def _harm_worker(chaos: ChaosCluster, cell: Cell, stop_s: float) -> list[str]:
    before = chaos.worker(_victim_name(cell))
    observer, fault = _strike(chaos, cell, before, stop_s)
    await chaos.arm(observer, fault)
    draining = cell.phase is Phase.DRAINING
    drain = asyncio.create_task(_drain(chaos, before.name)) if draining else None
    await chaos.until_fired(observer, (before.pid,))
    if drain is not None:
        await drain
    elif cell.harm is Harm.STOP:
        await asyncio.sleep(stop_s + 0.5)
        same = chaos.cluster.workers.get(before.name) == before
        return [] if same else [f"{before.name} was given up after {stop_s:g} s"]
    after = await chaos.until_replaced(before)
    problems = [] if is_gone(before.pid) else [f"{before.incarnation} still runs"]
    if cell.harm is Harm.RESTART:
        if after.address != before.address:
            problems.append(f"{before.name} moved from {before.address} to {after.address}")
        problems += await _is_used(after)
    return problems


async def _drain(chaos: ChaosCluster, name: str) -> None:
    """Drain a worker and wait until another incarnation serves, however the old one ended."""
    before = chaos.worker(name)
    with contextlib.suppress(CannotDrain):  # it died before it could say that it had understood
        async with asyncio.timeout(chaos.bound):
            async for _ in chaos.cluster.drain(name, remove=False):
                pass
    await chaos.until_replaced(before)


async def _is_used(info: WorkerInfo) -> list[str]:
    """Wait for a request on a restarted worker: its peers still knew its predecessor."""
    try:
        async with asyncio.timeout(60):
            while not any(
                one.name == "kvrelay_releases_total"
                and one.labels["outcome"] in ("handed_over", "finished")
                for one in await samples(info)
            ):
                await asyncio.sleep(0.1)
    except TimeoutError:
        return [f"nothing went through {info.incarnation}"]
    return []


def _strike(
    chaos: ChaosCluster, cell: Cell, victim: WorkerInfo, stop_s: float
) -> tuple[str, Fault]:
    """The worker that sees the phase, and the fault to arm on it."""
    itself = cell.phase in SEEN_BY_ITSELF[cell.victim]
    action = FaultAction.STOP if cell.harm in (Harm.STOP, Harm.STOP_FOR_GOOD) else FaultAction.KILL
    seconds = stop_s if cell.harm is Harm.STOP else 0.0
    if itself:
        return victim.name, Fault(action, cell.phase, seconds=seconds)
    observer = "decode-0" if cell.victim is Victim.PREFILL else "prefill-0"
    # A turn is saved when its prefill worker has long done its part.
    peer = "" if cell.phase is Phase.SAVING else victim.incarnation
    return observer, Fault(action, cell.phase, seconds=seconds, peer=peer, pid=victim.pid)


async def _harm_router(chaos: ChaosCluster, cell: Cell, stop_s: float) -> list[str]:
    """Harm the router, and replace it unless it goes on by itself."""
    pid = chaos.router.pid
    action = FaultAction.STOP if cell.harm in (Harm.STOP, Harm.STOP_FOR_GOOD) else FaultAction.KILL
    observer = "prefill-0" if cell.phase in PREFILL_SEES else "decode-0"
    await chaos.arm(observer, Fault(action, cell.phase, pid=pid))
    await chaos.until_fired(observer, (pid,))
    if cell.harm is Harm.STOP:
        await asyncio.sleep(stop_s)
        wake(pid)
        await asyncio.sleep(0.5)
        return []
    if cell.harm is Harm.STOP_FOR_GOOD:
        # Nobody tells the workers: what it had submitted runs to its end.
        await chaos.until_at_rest()
        os.kill(pid, signal.SIGKILL)
    await chaos.replace_router(same_address=cell.harm is Harm.RESTART)
    await asyncio.sleep(1)
    return []
