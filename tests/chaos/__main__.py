"""The fault matrix: `python -m tests.chaos` writes docs/chaos.md and what it is made from.

`--only WORDS` runs the cells whose names contain the words, and keeps the page's other cells;
`--sessions` does so with the second table, of sessions and host memory.
`--short` runs a few cells and writes nothing. `--two-networks` sends KV over a slow link by TCP
and writes docs/chaos-two-networks.md. `--hosts` harms hosts and links in place of processes, and
writes docs/chaos-hosts.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvrelay.deploy.nodes.local_ray import LocalRay
from tests.chaos.cells import (
    SESSION_PHASES,
    SHORT,
    SHORT_ALONE,
    Cell,
    Memory,
    Setup,
    Victim,
    matrix,
    session_matrix,
)
from tests.chaos.cluster import chaos_cluster
from tests.chaos.experiment import STOP_S, Report, experiment
from tests.chaos.hosts import run_hosts
from tests.chaos.load import make_cases
from tests.chaos.report import load, save, to_markdown
from tests.chaos.talks import Talk, learn_talks
from tests.chaos.two_networks import SLOW_LINK, two_networks
from tests.checkpoints import make_checkpoint
from tests.hosts.commands import why_not
from tests.hosts.skips import WHY_NO_HOSTS

TIMEOUT_S = 8.0
"""Worker timeout of the whole matrix: longer than the stop that a worker must survive."""
SHORT_TIMEOUT_S = 6.0
PAGE = Path("docs/chaos.md")
PAGE_OF_TWO_NETWORKS = Path("docs/chaos-two-networks.md")
ONE_HOST = "KV goes from memory to memory on one host."


async def run(model: Path, cells: Sequence[Cell], worker_timeout: float) -> dict[Cell, Report]:
    """Run the cells, those that need another cluster on one of their own."""
    reports: dict[Cell, Report] = {}
    setups = list(dict.fromkeys(cell.setup for cell in cells))
    for setup in setups:
        own = [cell for cell in cells if cell.setup == setup]
        reports |= await _run(model, own, worker_timeout, setup)
    return reports


async def _run(
    model: Path, cells: Sequence[Cell], worker_timeout: float, setup: Setup
) -> dict[Cell, Report]:
    """Run the cells on one cluster, in order."""
    reports: dict[Cell, Report] = {}
    async with chaos_cluster(
        model, worker_timeout=worker_timeout, decodes_alone=setup.alone, **setup.memory.options
    ) as chaos:
        talks: Sequence[Talk] = ()
        if setup.memory is Memory.PLAIN:
            expected = await chaos.learn(make_cases())
        else:
            talks, expected = await learn_talks(chaos)
        stop_s = min(STOP_S, worker_timeout / 2)
        for number, cell in enumerate(cells, 1):
            report = await experiment(chaos, cell, expected, talks=talks, stop_s=stop_s)
            reports[cell] = report
            verdict = "; ".join(report.problems) or "ok"
            _say(
                f"{number}/{len(cells)} {cell}: {report.requests} requests, slowest "
                f"{report.slowest:.1f} s, {report.seconds:.1f} s in all: {verdict}"
            )
    of_routers = [report for cell, report in reports.items() if cell.victim is Victim.ROUTER]
    if talks and of_routers and not any(report.adopted for report in of_routers):
        # Of one router's only: what its sessions had may be gone from the workers, or about to end.
        of_routers[-1].problems.append("no session was adopted by its digest")
    return reports


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a program's output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few cells, and no page written")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--two-networks", action="store_true", help="KV goes over a slow link")
    parser.add_argument("--sessions", action="store_true", help="sessions and host memory alone")
    parser.add_argument("--hosts", action="store_true", help="harm hosts and links")
    options = parser.parse_args()
    if options.hosts:
        if WHY_NO_HOSTS:
            parser.error(f"--hosts: {WHY_NO_HOSTS}")
        sys.exit(asyncio.run(run_hosts(options.only, _say)))
    if options.two_networks and (why := why_not()):
        parser.error(f"--two-networks: {why}")
    # Over the slow link a session is never read: computing is sooner.
    every = [*matrix(), *([] if options.two_networks else session_matrix())]
    possible = [cell for cell in every if not cell.impossible]
    cells = [*SHORT, *SHORT_ALONE] if options.short else possible
    cells = [cell for cell in cells if options.only in str(cell)]
    if options.sessions:
        cells = [cell for cell in cells if cell.phase in SESSION_PHASES]
    begun = time.monotonic()
    timeout = SHORT_TIMEOUT_S if options.short else TIMEOUT_S
    network = two_networks() if options.two_networks else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, LocalRay(workers=4), network:
        model = make_checkpoint(Path(folder) / "llama")
        reports = asyncio.run(run(model, cells, timeout))
    if not options.short:
        page = PAGE_OF_TWO_NETWORKS if options.two_networks else PAGE
        transport = SLOW_LINK if options.two_networks else ONE_HOST
        data = page.with_suffix(".json")
        all_reports = (load(data) if len(cells) < len(possible) else {}) | reports
        save(all_reports, data)
        page.write_text(to_markdown(all_reports, every, transport, timeout=timeout))
    wrong = sum(bool(report.problems) for report in reports.values())
    _say(f"{len(cells)} cells in {time.monotonic() - begun:.0f} s, {wrong} went wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
