"""The fault matrix of sessions and host memory, on real workers; see docs/chaos.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import SHORT_TIMEOUT_S, run
from tests.chaos.cells import Cell, Setup, session_matrix

CELLS = [cell for cell in session_matrix() if not cell.impossible]
SETUPS = dict.fromkeys(cell.setup for cell in CELLS)


def name_of(setup: Setup) -> str:
    return f"{setup.memory.name.lower()}{'-alone' if setup.alone else ''}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("setup", SETUPS, ids=name_of)
async def test_nobody_notices(ray: None, tiny: Path, setup: Setup) -> None:
    """One cluster after the other, each for all of its cells."""
    cells: list[Cell] = [cell for cell in CELLS if cell.setup == setup]
    reports = await run(tiny, cells, SHORT_TIMEOUT_S)
    assert reports.keys() == {*cells}
    assert not {str(cell): report.problems for cell, report in reports.items() if report.problems}
