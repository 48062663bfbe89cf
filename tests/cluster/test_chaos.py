"""The most telling cells of the fault matrix, one after the other on one cluster.

`make chaos` runs all of them; see docs/chaos.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrelay.deploy.controller.supervision.incarnation import Incarnation
from kvrelay.deploy.nodes.local_ray import ray as ray_itself
from kvrelay.engine.faults import Fault, FaultAction, FaultEvent
from tests.chaos.__main__ import SHORT_TIMEOUT_S
from tests.chaos.cells import SHORT, Cell
from tests.chaos.cluster import ChaosCluster, chaos_cluster, wake
from tests.chaos.experiment import experiment
from tests.chaos.load import Abort, Expected, Load, ask, check, make_cases
from tests.cluster.running import running

pytestmark = pytest.mark.slow
"""In `make test` other files do that: `test_locked_cluster.py`, `test_supervision.py`,
`test_failing_forwards.py` and `test_faults.py`.
"""


@pytest.fixture(scope="module")
async def chaos(ray, tiny) -> AsyncIterator[ChaosCluster]:
    async with chaos_cluster(tiny, worker_timeout=SHORT_TIMEOUT_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def expected(chaos: ChaosCluster) -> Expected:
    return await chaos.learn(make_cases())


@pytest.mark.parametrize("cell", SHORT, ids=str)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_nobody_notices(chaos: ChaosCluster, expected: Expected, cell: Cell):
    """Scenario 40 is among them: the restart at the same address."""
    report = await experiment(chaos, cell, expected)
    assert not report.problems


async def test_scenario_34_abort_while_a_slow_read_writes_its_pages(
    chaos: ChaosCluster, expected: Expected
):
    """The reads begin when their request has long gone, and others have come."""
    cases = list(expected)
    for number in range(2):
        late = [Fault(FaultAction.DELAY, FaultEvent.PULL, nth=n, seconds=0.5) for n in range(1, 4)]
        await chaos.arm(f"decode-{number}", *late)
    aborted = [
        asyncio.create_task(ask(chaos.router.stub, case, 60.0, Abort(1))) for case in cases[:3]
    ]
    await asyncio.gather(*aborted)
    others = await asyncio.gather(*(ask(chaos.router.stub, case, 60.0) for case in cases * 2))
    for other in others:
        assert other.completed
        assert other.tokens == expected[other.case]
    await chaos.until_at_rest()


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_that_cannot_be_killed_does_no_harm_when_it_wakes(
    chaos: ChaosCluster,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    """It is given up, others take its requests, and what it says of them later is too late."""
    monkeypatch.setattr(ray_itself, "kill", lambda *args, **more: None)
    monkeypatch.setattr(Incarnation, "_kill", lambda life: None)
    before = chaos.worker(name)
    load = Load(chaos.router.current, list(expected), chaos.bound)
    await load.warm(3)
    os.kill(before.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            while name in chaos.cluster.workers:
                await asyncio.sleep(0.05)
            await load.warm(len(load.outcomes) + 5)
    finally:
        wake(before.pid)
    async with asyncio.timeout(60):
        while chaos.cluster.workers.get(name) != before:
            await asyncio.sleep(0.05)
    await load.warm(len(load.outcomes) + 5)
    assert not check(await load.stop(), expected, may_be_lost=False)
    await chaos.until_at_rest()
    assert chaos.worker(name) == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_worker_that_is_told_to_die_does_so_in_its_first_life_only(ray, tiny):
    """As `kvrelay serve --debug-faults` has it."""
    options: dict[str, Any] = {"page_size": 4, "dtype": "float32"}
    options["worker_timeout"] = SHORT_TIMEOUT_S
    async with running(tiny, debug_faults="decode-0/kill:decoding", **options) as cluster:
        first = cluster.deployment.cluster.workers["decode-0"]
        for _ in range(3):
            answer = await cluster.generate(range(40), temperature=0, max_tokens=8)
            assert len(answer.tokens) == 8
        second = cluster.deployment.cluster.workers["decode-0"]
        assert second.incarnation != first.incarnation
        await cluster.assert_at_baseline()
