"""What a dashboard shows, whichever program draws it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

CLUSTER: Final = 'cluster=~"$cluster"'
"""Selects what is of the chosen clusters. With $-names as Grafana has them."""
WORKER: Final = f'{CLUSTER},role=~"$role",worker=~"$worker"'
"""Selects what is of the chosen workers."""
RATE: Final = "$__rate_interval"


class Draws(StrEnum):
    """How a panel draws what its queries return."""

    LINES = "lines"
    """A line a series."""
    AREAS = "areas"
    """A stack of areas; queries named `TOTAL` are lines over it."""
    HEATMAP = "heatmap"
    """The buckets of a histogram over time."""
    NUMBERS = "numbers"
    """The latest value of each series."""
    TABLE = "table"
    """The labels of each series that there is now."""


TOTAL: Final = "pool"
"""The legend of a line over a stack, which the stack fills."""
STATES: Final = {
    "held": "#2e7d32",
    "cached_protected": "#00838f",
    "session": "#8e24aa",
    "quarantined": "#d32f2f",
    "in_flight": "#f9a825",
    "cached_evictable": "#64a0e8",
    "free": "#e0e3e8",
}
"""Of pages, from what nobody else can have to what new requests can have, with the colors that
the live page and `kvrelay top` give them."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query in PromQL, and how its series are named: by labels in double braces."""

    expr: str
    legend: str = ""
    color: str = ""
    """Of all its series; empty: the program chooses."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    about: str
    """What the operator reads from it."""
    queries: tuple[Query, ...]
    unit: str = "short"
    """Of Grafana: `short`, `s`, `bytes`, `Bps`, `percentunit`, `reqps`."""
    draws: Draws = Draws.LINES
    width: int = 8
    """Of 24."""
    repeat: str = ""
    """The variable of which each value has a panel of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard; its values are those of a label."""

    name: str
    metric: str
    """Whose label it is, with a selector."""
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """All of them, from the top."""
        for row in self.rows:
            yield from row.panels


CLUSTERS: Final = Variable("cluster", "kvrelay_requests_live", "cluster")
ROLES: Final = Variable("role", f"kvrelay_pages{{{CLUSTER}}}", "role")
WORKERS: Final = Variable("worker", f'kvrelay_pages{{{CLUSTER},role=~"$role"}}', "worker")
POOLS: Final = Variable("pool", f'kvrelay_pages{{{WORKER},pool!="rows"}}', "pool")
OF_WORKERS: Final = (CLUSTERS, ROLES, WORKERS)
"""Of a dashboard about workers."""


def rate(metric: str, selector: str) -> str:
    """Of a counter, a second."""
    return f"rate({metric}{{{selector}}}[{RATE}])"


def by(labels: str, expr: str) -> str:
    """The sum by these labels."""
    return f"sum by ({labels}) ({expr})"


def states(selector: str) -> tuple[Query, ...]:
    """The pages of these pools by state, to be stacked, and the pools as a line over them."""
    of_states = [
        Query(
            by("pool", f'kvrelay_pages{{{selector},state="{state}"}}'),
            f"{{{{pool}}}} {state.replace('_', ' ')}",
            color,
        )
        for state, color in STATES.items()
    ]
    return (*of_states, Query(f"sum(kvrelay_pool_pages{{{selector}}})", TOTAL, "#ff780a"))


def heatmap(title: str, about: str, metric: str, selector: str) -> Panel:
    """A histogram over time, in seconds."""
    expr = f"sum by (le) (increase({metric}_bucket{{{selector}}}[{RATE}]))"
    return Panel(title, about, (Query(expr, "{{le}}"),), "s", Draws.HEATMAP, width=12)


def percentiles(title: str, about: str, metric: str, selector: str) -> Panel:
    """Three percentiles of a histogram over time, in seconds."""
    buckets = by("le", rate(f"{metric}_bucket", selector))
    queries = [
        Query(f"histogram_quantile({share / 100:g}, {buckets})", f"p{share}")
        for share in (50, 90, 99)
    ]
    return Panel(title, about, tuple(queries), "s", width=12)
