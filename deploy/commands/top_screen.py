"""The screen of `kvrelay top`: lines of text that fit the terminal's size.

Everything is shown by ASCII characters as well as by colours: a terminal may have no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Self

from rich.text import Text

from kvrelay.deploy.commands.status_tables import readiness
from kvrelay.wire.load import PAGE_STATES

_MARKS: Final = {
    "held": ("#", "green"),
    "cached_protected": ("=", "cyan"),
    "session": ("s", "magenta"),
    "quarantined": ("!", "red"),
    "in_flight": (">", "yellow"),
    "cached_evictable": ("-", "blue"),
    "free": (".", "bright_black"),
}
"""The mark of each page state in a bar, in the bar's order: free for new requests at the right."""
assert set(_MARKS) == set(PAGE_STATES)

_PHASES: Final = {
    "prefill": ("queued", "computed"),
    "decode": ("arriving", "generating"),
    "aggregated": ("queued", "running"),
}
"""The words for a worker's waiting and its running requests, by role."""
_HEAD: Final = ("worker", "state", "wait", "run", "tokens", "pool")
_NUMBERS: Final = ("wait", "run", "tokens")
_MAX_PROBLEMS: Final = 5
_MIN_BAR: Final = 8


@dataclass(frozen=True, slots=True)
class View:
    """A router's report at one moment, with rates."""

    server: str
    report: dict[str, Any]
    """The report, as `kvrelay status --json` prints it."""
    rates: Rates | None = None
    """The rates since the previous report; None: there is none."""
    problem: str = ""
    """The reason why there is no newer report; empty if the router has answered."""

    def next(self, report: dict[str, Any]) -> Self:
        """Return the view after one more report."""
        return replace(self, report=report, rates=Rates.between(self.report, report), problem="")

    def without_answer(self, problem: str) -> Self:
        """Return the view while the router does not answer."""
        return replace(self, rates=None, problem=problem)


def lines(view: View, width: int, height: int | None) -> list[Text]:
    """Return the screen: at most `height` lines (None: no limit) of at most `width` columns."""
    head = [*_head(view), *_problems(view)]
    left = None if height is None else max(2, height - len(head) - 2)
    table = _table(view.report["workers"], width, left)
    screen = [*head, Text(), *table, _legend(view.report["workers"])][:height]
    for line in screen:
        line.no_wrap = True
        line.truncate(width, overflow="crop")
    return screen


def _head(view: View) -> list[Text]:
    report = view.report
    uptime = timedelta(seconds=int(report["uptime_seconds"]))
    model = report["model"] or "NO MODEL (a role has no worker)"
    first = Text.assemble(
        (_printable(model), "bold"),
        f"  kvrelay {report['version']}  up {uptime}  {view.server}",
    )
    return [
        first,
        _labelled("requests", _requests(report)),
        _labelled("phases", _phases(report["workers"])),
        _labelled("rates", _rates(view)),
        _labelled("ended", _ended(report)),
    ]


def _labelled(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<9}", "bold"), text)


def _requests(report: dict[str, Any]) -> str:
    live = f"{report['live_requests']} live"
    if (counts := report["requests"]) is None:
        return live
    away = counts["waiting_for_workers"]
    return (
        f"{live}: {counts['waiting']} before the first token"
        f"{f' ({away} without a worker)' if away else ''}, {counts['streaming']} streaming"
    )


def _phases(workers: Sequence[dict[str, Any]]) -> str:
    """Describe requests by phase; one that is being handed over counts at both of its workers."""
    parts = []
    for role, (waiting, running) in _PHASES.items():
        of_role = [one for one in workers if one["role"] == role]
        waits = sum(one["waiting_requests"] for one in of_role)
        runs = sum(one["running_requests"] for one in of_role)
        if of_role:
            parts.append(f"{role} {waits} {waiting}, {runs} {running}")
    return "   ".join(parts) or "no workers"


def _rates(view: View) -> str:
    if view.report["requests"] is None:
        return "shown to a token with the right admin"
    if (rates := view.rates) is None:
        return "-"
    return (
        f"{_short(rates.ended_requests)} requests/s   "
        f"{_short(rates.prompt_tokens)} prompt tokens/s   "
        f"{_short(rates.output_tokens)} output tokens/s"
    )


def _ended(report: dict[str, Any]) -> str:
    if (counts := report["requests"]) is None:
        return "shown to a token with the right admin"
    by_number = sorted(counts["ended"].items(), key=lambda item: (-item[1], item[0]))
    ended = "  ".join(f"{outcome.lower()} {_short(number)}" for outcome, number in by_number)
    return f"{ended or 'none'}   resubmitted {_short(counts['resubmitted'])}"


def _problems(view: View) -> list[Text]:
    found = [*([view.problem] if view.problem else []), *_troubles(view.report["workers"])]
    shown = found[:_MAX_PROBLEMS]
    if more := len(found) - len(shown):
        shown[-1] = f"and {more + 1} more: kvrelay status"
    return [Text(f"! {_printable(one)}", "bold red") for one in shown]


def _troubles(workers: Iterable[dict[str, Any]]) -> Iterable[str]:
    for worker in workers:
        name = worker["worker"]
        if worker["refusal"]:
            yield f"REFUSED {name}: {worker['refusal']}"
        for pool in worker["pools"]:
            if pool["sum"] != pool["total"]:
                yield f"{name}: {pool['pool']} has {pool['sum']} of {pool['total']} pages (a bug)"
        for one in worker["quarantine"]:
            reason = one["reason"].replace("_", " ")
            yield f"{name}: {one['pages']} pages in quarantine for {one['seconds']} s: {reason}"
        for peer in worker["peers"]:
            if peer["refusal"]:
                yield f"{name} reads nothing from {peer['incarnation']}: {peer['refusal']}"


def _table(workers: Sequence[dict[str, Any]], width: int, height: int | None) -> list[Text]:
    """Return a line for each pool, or, if there are too many, for each worker's fullest pool."""
    rows = [row for worker in workers for row in _rows(worker, worker["pools"])]
    if height is not None and len(rows) + 1 > height:
        rows = [row for one in workers for row in _rows(one, _fullest(one["pools"]))]
    cells = [dict(zip(_HEAD, _HEAD, strict=True)), *(cells for cells, _ in rows)]
    widths = {name: max(len(row[name]) for row in cells) for name in _HEAD}
    numbers = 9  # "100% 1.5M"
    bar = max(_MIN_BAR, width - sum(widths.values()) - len(_HEAD) - numbers - 1)
    table = [Text(_columns(cells[0], widths) + " " + "used".rjust(bar + 5), "bold")]
    for row, pool in rows:
        line = Text(_columns(row, widths) + " ")
        if row["state"].isupper() or row["state"] == "no":
            line.stylize("bold red")
        if pool is not None:
            line.append_text(_bar(pool, bar))
            line.append(f" {_used_percent(pool):>3}% {_short(pool['total'])}")
        table.append(line)
    if height is not None and len(table) > height:
        hidden = len(table) - height + 1
        table[height - 1 :] = [Text(f"and {hidden} more lines: kvrelay status", "bold")]
    return table


Row = tuple[dict[str, str], dict[str, Any] | None]
"""The cells by column, and the pool for the bar; None: the worker has reported no pool."""


def _rows(worker: dict[str, Any], pools: Sequence[dict[str, Any]]) -> list[Row]:
    state = readiness(worker)
    first = {
        "worker": worker["worker"],
        "state": "ready" if state == "yes" else "away" if state == "no" else state,
        "wait": _short(worker["waiting_requests"]),
        "run": _short(worker["running_requests"]),
        "tokens": _short(worker["waiting_tokens"]),
        "pool": "",
    }
    if not pools:
        return [(first, None)]
    later = dict.fromkeys(_HEAD, "")
    return [
        ({**(later if index else first), "pool": pool["pool"]}, pool)
        for index, pool in enumerate(pools)
    ]


def _columns(row: dict[str, str], widths: dict[str, int]) -> str:
    return " ".join(
        row[name].rjust(size) if name in _NUMBERS else row[name].ljust(size)
        for name, size in widths.items()
    )


def _fullest(pools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [max(pools, key=_used_percent)] if pools else []


def _used_percent(pool: dict[str, Any]) -> int:
    """Return the percentage of a pool's pages that new requests cannot have.

    It is rounded up, so that a single page shows.
    """
    used: int = pool["sum"] - pool["free"] - pool["cached_evictable"]
    return -(-100 * used // pool["total"]) if pool["total"] else 0


def _bar(pool: dict[str, Any], width: int) -> Text:
    counts = [pool[state] for state in _MARKS]
    bar = Text()
    for (mark, colour), cells in zip(_MARKS.values(), shares(counts, width), strict=True):
        bar.append(mark * cells, colour)
    return bar


def shares(counts: Sequence[int], width: int) -> list[int]:
    """Divide `width` cells in proportion to the counts; each count above zero gets a cell at least.

    `width` must not be less than the number of counts above zero.
    """
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    cells = [max(1, count * width // total) if count else 0 for count in counts]
    while (missing := width - sum(cells)) != 0:
        # The one that is furthest from its share, and may change.
        off = [count * width / total - have for count, have in zip(counts, cells, strict=True)]
        may = [i for i, have in enumerate(cells) if (counts[i] if missing > 0 else have > 1)]
        pick = max(may, key=lambda i: off[i]) if missing > 0 else min(may, key=lambda i: off[i])
        cells[pick] += 1 if missing > 0 else -1
    return cells


def _legend(workers: Iterable[dict[str, Any]]) -> Text:
    """Return the meaning of the marks; that of copies between tiers only while there are some."""
    copies = any(pool["in_flight"] for worker in workers for pool in worker["pools"])
    legend = Text()
    for state, (mark, colour) in _MARKS.items():
        if state == "in_flight" and not copies:
            continue
        name = state.replace("_", " ")
        legend.append(f"{mark} ", colour).append(f"{name}  ")
    return legend


def _short(number: float) -> str:
    """Format a number in at most four characters."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            scaled = number / factor
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}" if number >= 99.95 or number == int(number) else f"{number:.1f}"


def _printable(text: str) -> str:
    """Return the text without characters that would move a terminal's cursor."""
    return "".join(one if one.isprintable() else "?" for one in text)


@dataclass(frozen=True, slots=True)
class Rates:
    """Events a second between two reports, by the router's own clock."""

    ended_requests: float
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def between(cls, before: dict[str, Any] | None, now: dict[str, Any]) -> Self | None:
        """Return the rates between two reports of `kvrelay status --json`.

        None: there is only one, the router does not tell this caller, or it has restarted.
        """
        if before is None or not before["requests"] or not now["requests"]:
            return None
        seconds = now["uptime_seconds"] - before["uptime_seconds"]
        if seconds <= 0:
            return None
        earlier, later = before["requests"], now["requests"]
        ended = sum(later["ended"].values()) - sum(earlier["ended"].values())
        return cls(
            ended / seconds,
            (later["prompt_tokens"] - earlier["prompt_tokens"]) / seconds,
            (later["output_tokens"] - earlier["output_tokens"]) / seconds,
        )
