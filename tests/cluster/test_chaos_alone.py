"""Cells of the fault matrix in a cluster whose decode workers compute the prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.chaos.__main__ import SHORT_TIMEOUT_S
from tests.chaos.cells import SHORT_ALONE, Cell, Harm
from tests.chaos.cluster import ChaosCluster, chaos_cluster
from tests.chaos.experiment import experiment
from tests.chaos.load import Expected, make_cases


@pytest.fixture(scope="module")
async def alone(ray, tiny) -> AsyncIterator[ChaosCluster]:
    async with chaos_cluster(tiny, worker_timeout=SHORT_TIMEOUT_S, decodes_alone=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def expected(alone: ChaosCluster) -> Expected:
    return await alone.learn(make_cases())


CELLS = [
    pytest.param(cell, marks=() if cell.harm is Harm.KILL else pytest.mark.slow)
    for cell in SHORT_ALONE
]
"""In `make test` other files have requests that fail, and restarts."""


@pytest.mark.slow  # `test_chaos.py` has pairs in `make test`
@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_nobody_notices(alone: ChaosCluster, expected: Expected, cell: Cell):
    report = await experiment(alone, cell, expected)
    assert not report.problems
