"""A dashboard as Perses' JSON, which a browser can draw without a server: to look at it.

    python -m docs.tools.dashboards.perses http://127.0.0.1:9090 FROM TO > dashboards.json

FROM and TO are seconds since 1970. Perses repeats no panels, so the values of variables are asked
of Prometheus here. It stacks all series of a panel, so the line of the total over a stack becomes a
threshold, with the last value that the total has had. Its heatmap draws native histograms alone,
so `rendering/heatmap.jsx` draws the buckets.
"""

from __future__ import annotations

import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from docs.tools.dashboards.pages import DASHBOARDS
from docs.tools.dashboards.spec import RATE, TOTAL, Dashboard, Draws, Panel, Query

_UNITS: Final = {
    "short": "decimal",
    "s": "seconds",
    "bytes": "bytes",
    "Bps": "bytes/sec",
    "percentunit": "percent-decimal",
    "reqps": "decimal",
}
_LABELS: Final = {"reqps": "a second"}
"""Beside the axis: the unit would take the space of the chart."""
_COLUMNS: Final = 24
_HEIGHT: Final = 8
_ANYTHING: Final = ".*"
_WIDE: Final = 12
"""Panels of so many columns have their legend at the right."""
_GOOD: Final = "#2e7d32"
_BAD: Final = "#d32f2f"
_HIDDEN: Final = ("timestamp", "value", "__name__", "job", "instance", "cluster", "model")
_TABLE: Final = {
    "kind": "Table",
    "spec": {
        "density": "compact",
        "columnSettings": [{"name": name, "hide": True} for name in _HIDDEN],
    },
}

RATE_SECONDS: Final = 10
"""Over which rates are taken; heatmaps have a column for each such time."""

Values = Callable[[str], Sequence[str]]
"""The values of a label."""
Number = Callable[[str], float | None]
"""The last value of a query that has one series."""


def _unknown(_expr: str) -> None:
    return None


def perses(
    one: Dashboard, prometheus: str, values: Values, number: Number = _unknown
) -> dict[str, Any]:
    """The dashboard, with its queries sent to this address."""
    panels: dict[str, Any] = {}
    layouts = []
    for row in one.rows:
        items = []
        left = top = 0
        for panel, chosen in _repeated(row.panels, values):
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _HEIGHT
            key = f"panel{len(panels)}"
            panels[key] = _panel(panel, chosen, number)
            place = {"x": left, "y": top, "width": panel.width, "height": _HEIGHT}
            items.append({**place, "content": {"$ref": f"#/spec/panels/{key}"}})
            left += panel.width
        display = {"title": row.title, "collapse": {"open": True}}
        layouts.append({"kind": "Grid", "spec": {"display": display, "items": items}})
    source = {
        "kind": "PrometheusDatasource",
        "spec": {"directUrl": prometheus, "scrapeInterval": "2s"},
    }
    return {
        "kind": "Dashboard",
        "metadata": {"name": one.uid, "project": "kvrelay", "version": 0},
        "spec": {
            "display": {"name": one.title},
            "duration": "5m",
            "variables": [],
            "datasources": {"prometheus": {"default": True, "plugin": source}},
            "panels": panels,
            "layouts": layouts,
        },
    }


def _repeated(panels: Sequence[Panel], values: Values) -> Iterator[tuple[Panel, Mapping[str, str]]]:
    """Each panel with the values of its variables that are chosen for it."""
    for panel in panels:
        if not panel.repeat:
            yield panel, {}
            continue
        for value in values(panel.repeat):
            yield panel, {panel.repeat: value}


def _panel(panel: Panel, chosen: Mapping[str, str], number: Number) -> dict[str, Any]:
    display = {"name": with_values(panel.title, chosen), "description": panel.about}
    format_ = {"unit": _UNITS[panel.unit], "shortValues": True}
    queries = panel.queries
    min_step_seconds = 2
    match panel.draws:
        case Draws.NUMBERS:
            plugin = _number(format_)
        case Draws.TABLE:
            plugin = _TABLE
        case Draws.HEATMAP:
            plugin = {"kind": "BucketsHeatMap", "spec": {"yAxisFormat": format_}}
            min_step_seconds = RATE_SECONDS
        case Draws.AREAS | Draws.LINES:
            totals = [query for query in queries if panel.draws is Draws.AREAS and is_total(query)]
            queries = tuple(query for query in queries if query not in totals)
            plugin = _chart(panel, format_, queries)
            plugin["spec"]["thresholds"] = _thresholds(totals, chosen, number)
    asked = [_query(query, chosen, min_step_seconds) for query in queries]
    return {"kind": "Panel", "spec": {"display": display, "plugin": plugin, "queries": asked}}


def is_total(query: Query) -> bool:
    """Whether it is the line over a stack."""
    return query.legend == TOTAL


def _number(format_: Mapping[str, Any]) -> dict[str, Any]:
    spec = {
        "calculation": "last-number",
        "format": format_,
        "thresholds": {"defaultColor": _GOOD, "steps": [{"value": 0.5, "color": _BAD}]},
    }
    return {"kind": "StatChart", "spec": spec}


def _chart(panel: Panel, format_: Mapping[str, Any], queries: Sequence[Query]) -> dict[str, Any]:
    visual: dict[str, Any] = {"palette": {"mode": "categorical"}, "pointRadius": 0, "lineWidth": 2}
    if panel.draws is Draws.AREAS:
        visual |= {"stack": "all", "areaOpacity": 0.8, "lineWidth": 0}
    position = "right" if panel.width >= _WIDE else "bottom"
    spec = {
        "legend": {"position": position, "mode": "list", "size": "small"},
        "yAxis": {"format": format_, "min": 0, "label": _LABELS.get(panel.unit, "")},
        "visual": visual,
        "querySettings": [
            {"queryIndex": index, "colorMode": "fixed", "colorValue": query.color}
            for index, query in enumerate(queries)
            if query.color
        ],
    }
    return {"kind": "TimeSeriesChart", "spec": spec}


def _thresholds(
    totals: Sequence[Query], chosen: Mapping[str, str], number: Number
) -> dict[str, Any]:
    found = [(query, number(with_values(query.expr, chosen))) for query in totals]
    steps = [
        {"name": query.legend, "value": value, "color": query.color}
        for query, value in found
        if value is not None
    ]
    return {"mode": "absolute", "steps": steps}


def _query(query: Query, chosen: Mapping[str, str], min_step_seconds: int) -> dict[str, Any]:
    spec = {
        "query": with_values(query.expr, chosen),
        "seriesNameFormat": query.legend,
        "minStep": f"{min_step_seconds}s",
    }
    plugin = {"kind": "PrometheusTimeSeriesQuery", "spec": spec}
    return {"kind": "TimeSeriesQuery", "spec": {"plugin": plugin}}


def with_values(text: str, chosen: Mapping[str, str]) -> str:
    """A query or a title with values in place of variables; those not chosen match anything."""
    fixed = dict.fromkeys(("cluster", "role", "worker", "pool"), _ANYTHING)
    for name, value in {**fixed, **chosen}.items():
        text = text.replace(f"${name}", value)
    return text.replace(RATE, f"{RATE_SECONDS}s").replace("$__range", "5m")


def _values_at(prometheus: str, begun: str, ended: str) -> Values:
    def values(label: str) -> Sequence[str]:
        found: list[str] = _ask(
            f"{prometheus}/api/v1/label/{label}/values",
            **{"match[]": "kvrelay_pages", "start": begun, "end": ended},
        )
        return found

    return values


def _number_at(prometheus: str, begun: str, ended: str) -> Number:
    seconds = int(ended) - int(begun)

    def number(expr: str) -> float | None:
        last = f"last_over_time(({expr})[{seconds}s:1s])"
        found = _ask(f"{prometheus}/api/v1/query", query=last, time=ended)["result"]
        return float(found[0]["value"][1]) if found else None

    return number


def _ask(address: str, **told: str) -> Any:
    url = f"{address}?{urllib.parse.urlencode(told)}"
    with urllib.request.urlopen(url) as answer:  # noqa: S310 (the operator's own)
        return json.load(answer)["data"]


def main(prometheus: str, begun: str, ended: str) -> None:
    """Print all dashboards."""
    values, number = _values_at(prometheus, begun, ended), _number_at(prometheus, begun, ended)
    json.dump([perses(one, prometheus, values, number) for one in DASHBOARDS], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
