"""KV over TCP on a slow link between two network namespaces, where late bytes are real.

`python -m tests.chaos --two-networks` runs the whole fault matrix there.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

from kvrelay.engine.faults import Phase
from tests.chaos.__main__ import SHORT_TIMEOUT_S
from tests.chaos.cells import Cell, Harm, Victim
from tests.chaos.cluster import ChaosCluster, chaos_cluster, samples
from tests.chaos.experiment import experiment
from tests.chaos.load import Case, Load, check, make_cases
from tests.chaos.two_networks import two_networks, why_not

KV_MEMORY = 640 << 10
"""Two requests fit, or three: whoever comes next takes the pages of one that has just gone."""
WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
async def chaos(ray, tiny) -> AsyncIterator[ChaosCluster]:
    with two_networks():
        async with chaos_cluster(
            tiny, worker_timeout=SHORT_TIMEOUT_S, kv_memory=KV_MEMORY
        ) as cluster:
            yield cluster


@pytest.fixture(scope="module")
async def expected(chaos: ChaosCluster) -> dict[Case, list[int]]:
    return await chaos.learn(make_cases())


async def quarantined(chaos: ChaosCluster) -> float:
    """Pages of decode workers that bytes may still come for."""
    workers = chaos.cluster.workers.items()
    told = [await samples(info) for name, info in workers if name.startswith("decode")]
    return sum(
        one.value
        for one in itertools.chain(*told)
        if one.name == "kvrelay_pages" and one.labels["state"] == "quarantined"
    )


async def test_scenario_34_bytes_that_come_after_an_abort_change_no_token(
    chaos: ChaosCluster, expected: dict[Case, list[int]]
):
    load = Load(chaos.router.current, list(expected), chaos.bound, clients=8, aborts=0.6)
    most = 0.0
    while len(load.outcomes) < 80:
        most = max(most, await quarantined(chaos))
    outcomes = await load.stop()
    assert not check(outcomes, expected, may_be_lost=False)
    assert sum(outcome.aborted for outcome in outcomes) > 20
    assert most > 0, "no abort came while a read was running"
    await chaos.until_at_rest()


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
async def test_nobody_notices(chaos: ChaosCluster, expected: dict[Case, list[int]], cell: Cell):
    report = await experiment(chaos, cell, expected, stop_s=SHORT_TIMEOUT_S / 2)
    assert not report.problems
