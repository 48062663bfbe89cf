"""The fault matrix of hosts and links: `make chaos CHAOS=--hosts` writes docs/chaos-hosts.md."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.load import make_cases
from tests.hosts.faults import CELLS, CUT_S, PAUSE_S, Cell, Harm, Report, Way, experiment
from tests.hosts.served_hosts import LEASE_S, TIMEOUT_S, learn, served_hosts

PAGE = Path("docs/chaos-hosts.md")
HEAD = """\
# The fault matrix of hosts

Made by `make chaos CHAOS=--hosts`, which needs root; the [other matrix](chaos.md) harms processes.
{summary}

Four hosts on one machine, each with a network, processes, mounts and shared memory of its own: the
controller with Ray's head, a router, a prefill worker (P) and a decode worker (D). They are on one
bridge, and KV goes by TCP. The pools hold two or three requests, every page is audited at every
step, a worker is given up after {timeout:g} s without a sign of life, and its lease lasts
{lease:g} s. Four clients ask the router for greedy and sampled answers, one after another. Then a
host is killed, or frozen for {pause:g} s and woken, or a link is cut for {cut:g} s and healed: what
is sent there does not arrive, and nobody is told. "Cut controller" cuts Ray's head off, too. A host
that was killed is followed by another one with its label, of another name and address, and a node
that Ray has given up is started again at once. Then:

- every request has its end within {bound:g} s: a completion, or else `UNAVAILABLE` or
  `RESOURCE_EXHAUSTED` (refused);
- what was completed has, token for token, what the undisturbed run said; what was not, a
  beginning of it;
- both workers serve again, every page and row comes back, and quarantine is empty;
- new requests are served right.

That bytes which come late, from a host that was taken for dead, find no memory of others is shown
with fences that are planted to pass early, too: `tests/hosts/test_late_bytes.py`.

A cell says how many requests there were, how many of them were refused, the seconds of the slowest,
and after how many seconds all was as before.

"""


async def run_hosts(only: str, say: Callable[[str], None]) -> int:
    """Run the cells whose name contains the words; returns whether any went wrong."""
    begun, reports = time.monotonic(), _load()
    cells = [cell for cell in CELLS if only in str(cell)]
    async with served_hosts() as chaos:
        expected = await learn(chaos.stub, make_cases(), chaos.bound)
        bound = chaos.bound + PAUSE_S
        for number, cell in enumerate(cells, 1):
            report = reports[cell] = await experiment(chaos, cell, expected)
            verdict = "; ".join(report.problems) or "ok"
            say(f"{number}/{len(cells)} {cell}: {_figures(report)}: {verdict}")
            _save(reports, bound)
    wrong = sum(bool(reports[cell].problems) for cell in cells)
    say(f"{len(cells)} cells in {time.monotonic() - begun:.0f} s, {wrong} went wrong")
    return bool(wrong)


def to_markdown(reports: Mapping[Cell, Report], bound: float) -> str:
    """The whole page."""
    wrong = [report for report in reports.values() if report.problems]
    requests = sum(report.requests for report in reports.values())
    summary = f"Last run: {len(reports)} cells, {requests} requests, {len(wrong)} failures."
    times = {"timeout": TIMEOUT_S, "lease": LEASE_S, "pause": PAUSE_S, "cut": CUT_S}
    lines = [HEAD.format(summary=summary, bound=bound, **times).rstrip("\n"), ""]
    lines += ["| harm | to | lost | result |", "| --- | --- | --- | --- |"]
    for cell in CELLS:
        report = reports.get(cell)
        lost = cell.way if cell.cuts else "-"
        result = "not run"
        if report is not None:
            result = f"{'**failed**' if report.problems else 'ok'}: {_figures(report)}"
        lines.append(f"| {cell.harm} | {cell.victim} | {lost} | {result} |")
    if wrong:
        lines += ["", "## What went wrong", ""]
        lines += [f"- {report.cell}: {'; '.join(report.problems)}" for report in wrong]
    return "\n".join(lines) + "\n"


def _figures(report: Report) -> str:
    refused = f" ({report.refused} refused)" if report.refused else ""
    slowest, recovered = f"{report.slowest:.1f} s", f"{report.recovered:.0f} s"
    return f"{report.requests} requests{refused}, slowest {slowest}, as before after {recovered}"


def _save(reports: Mapping[Cell, Report], bound: float) -> None:
    PAGE.write_text(to_markdown(reports, bound))
    told = [asdict(report) for report in reports.values()]
    PAGE.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")


def _load() -> dict[Cell, Report]:
    path = PAGE.with_suffix(".json")
    if not path.exists():
        return {}
    found = [_report(**one) for one in json.loads(path.read_text())]
    return {report.cell: report for report in found if report.cell in CELLS}


def _report(cell: dict[str, str], **more: Any) -> Report:
    return Report(Cell(Harm(cell["harm"]), cell["victim"], Way(cell["way"])), **more)
