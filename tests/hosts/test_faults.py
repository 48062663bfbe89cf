"""Hosts that die or freeze, and links that are cut, under load with small pools.

`make chaos CHAOS=--hosts` writes what comes of each into docs/chaos-hosts.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.chaos.load import Expected, make_cases
from tests.hosts.faults import CELLS, Cell, Harm, Way, experiment
from tests.hosts.served_hosts import ServedHosts, learn, served_hosts
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
]

CUTS = {Harm.CUT_ROUTER, Harm.CUT_CONTROLLER}
"""Of links whose ways are each cut once here, at P or at D. `make chaos` cuts all of both."""


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[ServedHosts]:
    async with served_hosts() as served:
        yield served


@pytest.fixture(scope="module")
async def expected(served: ServedHosts) -> Expected:
    return await learn(served.stub, make_cases(), served.bound)


def is_run(cell: Cell) -> bool:
    last = [*Way][-1]
    return cell.harm not in CUTS or (cell.victim == "D") == (cell.way is last)


@pytest.mark.parametrize("cell", [*filter(is_run, CELLS)], ids=str)
async def test_every_request_ends_and_every_page_comes_back(
    served: ServedHosts, expected: Expected, cell: Cell
):
    report = await experiment(served, cell, expected)
    assert not report.problems, served.log[-80:]
