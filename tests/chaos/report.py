"""Writes the page of the fault matrix from its reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvrelay.engine.phases import Phase
from tests.chaos.cells import PHASES, SESSION_PHASES, Cell, Harm, Victim
from tests.chaos.cluster import bound_of
from tests.chaos.experiment import Report

HEAD = """\
# The fault matrix

Made by `make chaos`; `make chaos-short` runs the most telling cells, and so does `make test-all`.
[Another matrix](chaos-hosts.md) kills and freezes hosts, and cuts links.
{summary} {transport}

A real cluster: two prefill workers (P) and two decode workers (D) as Ray actors over NIXL and
gRPC, a router in a process of its own, a tiny Llama in float32, every page audited at every
step, and a worker given up after {timeout:g} s without a sign of life. `D alone` is one of two
decode workers in a cluster without prefill workers: they compute the prompts. Five clients ask one
request after another, greedy and sampled ones; some requests are retracted, too. When a request
reaches the phase, the harm is done. Then:

- every client gets its end within {bound:g} s: a completion; or `UNAVAILABLE`, only where the
  router was harmed, which holds its clients' connections; or `INTERNAL`, of the one request that
  breaks every forward;
- every completed stream has, token for token, what the undisturbed run said; every other one a
  beginning of it;
- every page and row of every worker comes back, and quarantine is empty;
- no worker was replaced but the one that was killed or stopped for good, hangs, or has a broken
  device, and of that one no process is left;
- what comes back at the same address is used again by the workers that knew its predecessor;
- eight new requests at once are served right.

A cell says how many requests there were, and the seconds of the slowest. `-` cannot be, for the
reason given below.
"""
SESSIONS = """\
## Sessions and host memory

The same, with another load: five clients have conversations of four turns by sessions. Either there
is no prefix index, so that each turn is read from its session; or two conversations fit on a
device, and the KV of the others goes to the host and comes back. A worker is *saving* when a turn
has ended well and its session is to keep the KV, *borrowing* when a session is lent or read,
*prefetching* and *writing back* when a copy from or to the host has begun. Clients that lose their
router open the session on the next one by its history's digest, or with its history.
"""


def save(reports: Mapping[Cell, Report], path: Path) -> None:
    """Save the reports, so that a later run of some cells leaves the others as they were."""
    path.write_text(json.dumps([asdict(report) for report in reports.values()], indent=1) + "\n")


def load(path: Path) -> dict[Cell, Report]:
    """The reports that were saved last; none if there is no such file."""
    if not path.exists():
        return {}
    found = [_report(**one) for one in json.loads(path.read_text())]
    return {report.cell: report for report in found if not report.cell.impossible}


def _report(cell: dict[str, str], **more: Any) -> Report:
    where = Cell(Harm(cell["harm"]), Victim(cell["victim"]), Phase(cell["phase"]))
    return Report(where, **more)


def to_markdown(
    reports: Mapping[Cell, Report], cells: Sequence[Cell], transport: str, *, timeout: float
) -> str:
    """The whole page, in Markdown."""
    wrong = [report for report in reports.values() if report.problems]
    minutes = sum(report.seconds for report in reports.values()) / 60
    requests = sum(report.requests for report in reports.values())
    summary = (
        f"Last run: {len(reports)} cells, {requests} requests, {minutes:.0f} minutes, "
        f"{len(wrong)} failures."
    )
    lines = [
        HEAD.format(summary=summary, transport=transport, timeout=timeout, bound=bound_of(timeout))
    ]
    reasons: dict[str, list[Cell]] = {}
    lines += _table(cells, PHASES, reports, reasons)
    if any(cell.phase in SESSION_PHASES for cell in cells):
        lines += ["", SESSIONS, *_table(cells, SESSION_PHASES, reports, reasons)]
    lines += ["", "## What cannot be", ""]
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    if wrong:
        lines += ["", "## What went wrong", ""]
        for report in wrong:
            lines.append(f"- {report.cell}: {'; '.join(report.problems)}")
    return "\n".join(lines) + "\n"


def _table(
    cells: Sequence[Cell],
    phases: Sequence[Phase],
    reports: Mapping[Cell, Report],
    reasons: dict[str, list[Cell]],
) -> Iterator[str]:
    """The lines of a table with these columns."""
    yield "| harm | to | " + " | ".join(phase.replace("_", " ") for phase in phases) + " |"
    yield "| --- | --- | " + " | ".join("---" for _ in phases) + " |"
    for harm in Harm:
        for victim in Victim:
            row = [cell for cell in cells if (cell.harm, cell.victim) == (harm, victim)]
            texts = [_text(cell, reports, reasons) for cell in row if cell.phase in phases]
            if texts:
                yield f"| {harm} | {victim} | {' | '.join(texts)} |"


def _text(cell: Cell, reports: Mapping[Cell, Report], reasons: dict[str, list[Cell]]) -> str:
    if cell.impossible:
        reasons.setdefault(cell.impossible, []).append(cell)
        return f"- ({list(reasons).index(cell.impossible) + 1})"
    report = reports.get(cell)
    if report is None:
        return "not run"
    lost = f", {report.lost} lost" if report.lost else ""
    verdict = "**failed**" if report.problems else "ok"
    return f"{verdict}: {report.requests}{lost}, {report.slowest:.1f} s"
