"""Random load, aborts and faults from a seed: `python -m tests.chaos.soak --minutes 20 --seed 1`.

It computes in float64, so that a token cannot depend on the other requests of its batch. Every
minute the load pauses, and every page must be free again. At the end it prints how much memory
each process has gained, if it lived for two minutes. A process that lived for ten minutes and
grew by more than half a MiB a minute is a failure. The first worker of each role and this
process are never killed.

`--signals` is another kind of it, from outside: the default model in float32, several choices,
signals to any worker in place of faults inside (SIGKILL, SIGTERM, SIGSTOP for good and for a
time), and small pools. A request that came when a role had lost all of its workers may be told
to try again; every other one must complete, with the tokens of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from kvrelay.deploy.nodes.local_ray import LocalRay
from kvrelay.deploy.nodes.models import resolve_model, users_models
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL
from kvrelay.engine.faults import Fault, FaultAction, FaultEvent
from kvrelay.engine.phases import Phase
from tests.chaos.cluster import ChaosCluster, chaos_cluster
from tests.chaos.load import Case, Expected, Load, Outcome, check, make_cases
from tests.chaos.signals import Signals
from tests.checkpoints import make_checkpoint

WORKER_TIMEOUT_S = 8.0
SLOW_WORKER_TIMEOUT_S = 12.0
"""Of a model that computes for longer."""
ROUND_S = 60.0
SETTLED_S = 60.0
"""Growth before this age is not counted, because a process still warms up."""
LONG_ENOUGH_S = 120.0
"""A process that lived for a shorter time is not reported."""
FLAT, FLAT_AFTER_MINUTES = 0.5, 10.0
"""Growth in MiB a minute that is no leak, and the age in minutes from which it is checked."""
MIB = 1 << 20


@dataclass
class Memory:
    """The resident memory of each process over time: pairs of seconds and MiB."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, chaos: ChaosCluster) -> None:
        processes = {info.incarnation: info.pid for info in chaos.cluster.workers.values()}
        processes |= {"this process": os.getpid(), f"router {chaos.router.pid}": chaos.router.pid}
        for name, pid in processes.items():
            try:
                taken = psutil.Process(pid).memory_info().rss / MIB
            except psutil.NoSuchProcess:
                continue
            self.seen[name].append((time.monotonic(), taken))

    def report(self) -> Iterator[tuple[bool, str]]:
        """For each process that lived long enough, whether it has grown, and by how much."""
        for name, seen in self.seen.items():
            times, taken = np.array(seen).T
            settled = times - times[0] >= SETTLED_S
            if times[-1] - times[0] < LONG_ENOUGH_S or settled.sum() < 3:
                continue
            slope = np.polyfit(times[settled] / 60, taken[settled], 1)[0]
            minutes = (times[-1] - times[0]) / 60
            first, last = taken[settled][0], taken[-1]
            line = f"{name}: {first:.1f} MiB after a minute, {last:.1f} MiB at the end, "
            line += f"{slope:+.2f} MiB a minute over {minutes:.0f} minutes"
            yield slope > FLAT and minutes > FLAT_AFTER_MINUTES, line


def random_fault(rng: random.Random, chaos: ChaosCluster) -> tuple[str, Fault]:
    """A random fault, and the name of the worker to arm it on."""
    if rng.random() < 0.6:
        event = rng.choice(list(FaultEvent))
        action = rng.choice(
            [FaultAction.DELAY, FaultAction.DUPLICATE, FaultAction.FAIL, FaultAction.DROP]
        )
        sent_by_decode = event in (FaultEvent.GRANT, FaultEvent.DONE, FaultEvent.PULL)
        name = f"{'decode' if sent_by_decode else 'prefill'}-{rng.randrange(2)}"
        return name, Fault(action, event, nth=rng.randint(1, 4), seconds=rng.random())
    action = rng.choice([FaultAction.KILL, FaultAction.KILL, FaultAction.STOP])
    seconds = rng.choice([0.0, 1.0, 3.0]) if action is FaultAction.STOP else 0.0
    own = {
        "prefill": [Phase.QUEUED, Phase.PREFILLING, Phase.ANNOUNCED],
        "decode": [
            Phase.QUEUED,
            Phase.ANNOUNCED,
            Phase.PULLING,
            Phase.PULLED,
            Phase.DECODING,
        ],
    }
    role = rng.choice(["prefill", "decode"])
    return f"{role}-1", Fault(action, rng.choice(own[role]), rng.randint(1, 4), seconds=seconds)


class Faults:
    """Arms random faults inside the workers."""

    def __init__(self, chaos: ChaosCluster, rng: random.Random) -> None:
        self._chaos = chaos
        self._rng = rng

    async def send_one(self) -> str:
        """Arm one; returns which, or why none was armed."""
        name, fault = random_fault(self._rng, self._chaos)
        if name not in self._chaos.cluster.workers:
            return "nobody to harm"
        try:
            async with asyncio.timeout(5):
                await self._chaos.arm(name, fault)
        except Exception as error:  # it is being replaced
            return f"not armed: {type(error).__name__}"
        return f"{fault.action}"

    async def settle(self) -> None:
        """Disarm what has not happened yet."""
        for name in list(self._chaos.cluster.workers):
            await self._chaos.arm(name)


@dataclass(frozen=True)
class Kind:
    """What is run, and how it is disturbed."""

    disturbance: type[Faults | Signals]
    dtype: str
    worker_timeout: float
    kv_memory: int
    cases: Callable[[int], list[Case]]
    may_be_lost: bool
    """Requests may be told to try again."""


FROM_INSIDE = Kind(
    Faults, "float64", WORKER_TIMEOUT_S, 4 * MIB, lambda seed: make_cases(seed, 24), False
)
FROM_OUTSIDE = Kind(
    Signals,
    "float32",
    SLOW_WORKER_TIMEOUT_S,
    48 * MIB,
    lambda seed: make_cases(seed, 16, vocab_size=49_000, most_choices=3),
    True,
)


async def soak(model: Path, minutes: float, seed: int, kind: Kind = FROM_INSIDE) -> int:
    """Run the soak; returns how many things were wrong."""
    rng, wrong, memory = random.Random(seed), 0, Memory()
    totals: Counter[str] = Counter()
    async with chaos_cluster(
        model, worker_timeout=kind.worker_timeout, dtype=kind.dtype, kv_memory=kind.kv_memory
    ) as chaos:
        expected = await chaos.learn(kind.cases(seed))
        disturbance = kind.disturbance(chaos, rng)
        _say(f"{len(expected)} cases are known")
        ends = time.monotonic() + minutes * 60
        while time.monotonic() < ends:
            seconds = min(ROUND_S, minutes * 60)
            outcomes = await _round(chaos, expected, disturbance, rng, seconds, memory, totals)
            wrong += await _settle(chaos, expected, disturbance, outcomes, kind.may_be_lost)
            killed = rng.random() < 0.3
            if killed:  # between rounds, so that the streams of a round all have their ends
                await chaos.replace_router(same_address=rng.random() < 0.5)
                totals["routers replaced"] += 1
            _say(f"{time.monotonic() - ends + minutes * 60:.0f} s: {dict(totals)}, {wrong} wrong")
    for grows, line in memory.report():
        wrong += grows
        _say(f"GROWS: {line}" if grows else line)
    return wrong


async def _round(
    chaos: ChaosCluster,
    expected: Expected,
    disturbance: Faults | Signals,
    rng: random.Random,
    seconds: float,
    memory: Memory,
    totals: Counter[str],
) -> list[Outcome]:
    """Run load with a fault every few seconds; returns the outcome of every request."""
    load = Load(
        chaos.router.current, list(expected), chaos.bound, seed=rng.randrange(1 << 30), aborts=0.2
    )
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        totals[await disturbance.send_one()] += 1
        memory.look(chaos)
        await asyncio.sleep(rng.uniform(1, 8))
    outcomes = await load.stop()
    totals["requests"] += len(outcomes)
    totals["aborted"] += sum(outcome.aborted for outcome in outcomes)
    lost = [one for one in outcomes if one.status is not None and not one.aborted]
    totals["lost"] += len(lost)
    for one in lost:
        _say(f"lost after {one.seconds:.1f} s: {one.status}: {one.detail}")
    return outcomes


async def _settle(
    chaos: ChaosCluster,
    expected: Expected,
    disturbance: Faults | Signals,
    outcomes: list[Outcome],
    may_be_lost: bool,
) -> int:
    """Wait until every page is free and check all tokens; returns how many things were wrong."""
    problems = check(outcomes, expected, may_be_lost=may_be_lost)
    try:
        for _ in range(600):
            if len(chaos.cluster.workers) == 4:
                break
            await asyncio.sleep(0.1)
        await disturbance.settle()
        await chaos.until_at_rest()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    for problem in problems:
        _say(f"WRONG: {problem}")
    return len(problems)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a program's output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", action="store_true", help="disturb it from outside")
    parser.add_argument(
        "--bfloat16", action="store_true", help="with --signals: in bfloat16, batch invariant"
    )
    options = parser.parse_args()
    if options.bfloat16 and not options.signals:
        parser.error("--bfloat16 needs --signals")
    with tempfile.TemporaryDirectory() as folder, LocalRay(workers=4):
        if options.signals:
            model = resolve_model(DEFAULT_MODEL, "bfloat16", users_models(), lambda _: None).path
        else:
            model = make_checkpoint(Path(folder) / "llama")
        kind = FROM_OUTSIDE if options.signals else FROM_INSIDE
        kind = replace(kind, dtype="bfloat16") if options.bfloat16 else kind
        wrong = asyncio.run(soak(model, options.minutes, options.seed, kind))
    _say(f"{wrong} things went wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
