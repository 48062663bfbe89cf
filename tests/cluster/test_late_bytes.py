"""KV over TCP on a slow link between two network namespaces, where late bytes are real.

`python -m tests.chaos --two-networks` runs the whole fault matrix there.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvrelay.engine.phases import Phase
from kvrelay.wire.worker_info import WorkerInfo
from tests.chaos.__main__ import SHORT_TIMEOUT_S
from tests.chaos.cells import Cell, Harm, Victim
from tests.chaos.cluster import ChaosCluster, chaos_cluster, samples
from tests.chaos.experiment import experiment
from tests.chaos.load import Expected, Load, check, make_cases
from tests.chaos.two_networks import Link, two_networks
from tests.hosts.commands import why_not

KV_MEMORY = 640 << 10
"""Two requests fit, or three: whoever comes next takes the pages of one that has just gone."""
CUT_AGAIN_S = 2.0
WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with two_networks() as link:
        yield link


@pytest.fixture(scope="module")
async def chaos(ray, tiny, link: Link) -> AsyncIterator[ChaosCluster]:
    async with chaos_cluster(tiny, worker_timeout=SHORT_TIMEOUT_S, kv_memory=KV_MEMORY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def expected(chaos: ChaosCluster) -> Expected:
    return await chaos.learn(make_cases())


async def quarantined(chaos: ChaosCluster) -> float:
    """Pages of decode workers that bytes may still come for."""
    return await total(chaos, "kvrelay_pages", state="quarantined")


def decode_workers(chaos: ChaosCluster) -> list[WorkerInfo]:
    return [info for name, info in chaos.cluster.workers.items() if name.startswith("decode")]


async def failed_reads(chaos: ChaosCluster) -> float:
    """Of decode workers; probes do not count."""
    return await total(chaos, "kvrelay_transfers_total", result="failed")


async def cut_until_a_read_fails(chaos: ChaosCluster, link: Link) -> None:
    """Cut the link again and again: no read notices a cut that comes between two of them."""
    failed = await failed_reads(chaos)
    assert link.cut()
    cut_at = time.monotonic()
    while await failed_reads(chaos) == failed:
        if time.monotonic() - cut_at > CUT_AGAIN_S:
            link.cut()
            cut_at = time.monotonic()
        await asyncio.sleep(0.1)


async def total(chaos: ChaosCluster, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, of all decode workers."""
    told = [await samples(info) for info in decode_workers(chaos)]
    return sum(
        one.value
        for one in itertools.chain(*told)
        if one.name == name and labels.items() <= one.labels.items()
    )


@pytest.mark.slow  # test_chaos.py has this scenario with fewer requests in `make test`
async def test_scenario_34_bytes_that_come_after_an_abort_change_no_token(
    chaos: ChaosCluster, expected: Expected
):
    load = Load(chaos.router.current, list(expected), chaos.bound, clients=8, aborts=0.6)
    most = 0.0
    while len(load.outcomes) < 80 or not most:
        most = max(most, await quarantined(chaos))
    outcomes = await load.stop()
    assert not check(outcomes, expected, may_be_lost=False)
    assert sum(outcome.aborted for outcome in outcomes) > 20
    await chaos.until_at_rest()


@pytest.mark.slow
async def test_connections_that_break_are_made_again(
    chaos: ChaosCluster, link: Link, expected: Expected
):
    """Decode workers have every page back, and do not restart for it.

    A prefill worker may die of it, within UCX: see docs/lab/transfer.md, "connections that break".
    """
    before = decode_workers(chaos)
    load = Load(chaos.router.current, list(expected), chaos.bound, clients=8)
    for cut in range(1, 4):
        await cut_until_a_read_fails(chaos, link)
        await load.warm(20 * cut)
    outcomes = await load.stop()
    assert not check(outcomes, expected, may_be_lost=False)
    await chaos.until_at_rest()
    assert decode_workers(chaos) == before


CELLS = [
    Cell(harm, victim, Phase.PULLING)
    for harm, victim in (
        (Harm.KILL, Victim.PREFILL),
        (Harm.STOP_FOR_GOOD, Victim.PREFILL),
        (Harm.RESTART, Victim.PREFILL),
        (Harm.KILL, Victim.DECODE),
        (Harm.STOP, Victim.DECODE),
        (Harm.KILL, Victim.ROUTER),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_nobody_notices(chaos: ChaosCluster, expected: Expected, cell: Cell):
    report = await experiment(chaos, cell, expected, stop_s=SHORT_TIMEOUT_S / 2)
    assert not report.problems
