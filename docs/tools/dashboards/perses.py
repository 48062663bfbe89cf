"""A dashboard as Perses' JSON, which a browser can draw without a server: to look at it.

    python -m docs.tools.dashboards.perses http://127.0.0.1:9090 > dashboards.json

Perses repeats no panels, so the values of variables are asked of Prometheus here. It draws
histograms of Prometheus' native kind alone, so heatmaps become lines, a bucket each.
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
    "reqps": "requests/sec",
}
_COLUMNS: Final = 24
_HEIGHT: Final = 8
_ANYTHING: Final = ".*"

Values = Callable[[str], Sequence[str]]
"""The values of a label."""


def perses(one: Dashboard, prometheus: str, values: Values) -> dict[str, Any]:
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
            panels[key] = _panel(panel, chosen)
            place = {"x": left, "y": top, "width": panel.width, "height": _HEIGHT}
            items.append({**place, "content": {"$ref": f"#/spec/panels/{key}"}})
            left += panel.width
        display = {"title": row.title, "collapse": {"open": True}}
        layouts.append({"kind": "Grid", "spec": {"display": display, "items": items}})
    source = {"kind": "PrometheusDatasource", "spec": {"directUrl": prometheus}}
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


def _panel(panel: Panel, chosen: Mapping[str, str]) -> dict[str, Any]:
    display = {"name": with_values(panel.title, chosen), "description": panel.about}
    format_ = {"unit": _UNITS[panel.unit], "shortValues": True}
    queries = panel.queries
    if panel.draws is Draws.NUMBERS:
        plugin = {
            "kind": "StatChart",
            "spec": {"calculation": "last-number", "format": format_},
        }
    else:
        visual: dict[str, Any] = {"lineWidth": 1.5}
        if panel.draws is Draws.AREAS:
            # It stacks all that it draws, so the line of the total is left out.
            queries = tuple(query for query in queries if query.legend != TOTAL)
            visual = {"stack": "all", "areaOpacity": 0.8, "lineWidth": 0}
        legend = {"position": "bottom", "mode": "list", "size": "small"}
        spec = {"legend": legend, "yAxis": {"format": format_, "min": 0}, "visual": visual}
        plugin = {"kind": "TimeSeriesChart", "spec": spec}
    asked = [_query(query, chosen) for query in queries]
    return {"kind": "Panel", "spec": {"display": display, "plugin": plugin, "queries": asked}}


def _query(query: Query, chosen: Mapping[str, str]) -> dict[str, Any]:
    spec = {"query": with_values(query.expr, chosen), "seriesNameFormat": query.legend}
    plugin = {"kind": "PrometheusTimeSeriesQuery", "spec": spec}
    return {"kind": "TimeSeriesQuery", "spec": {"plugin": plugin}}


def with_values(text: str, chosen: Mapping[str, str]) -> str:
    """A query or a title with values in place of variables; those not chosen match anything."""
    fixed = dict.fromkeys(("cluster", "role", "worker", "pool"), _ANYTHING)
    for name, value in {**fixed, **chosen}.items():
        text = text.replace(f"${name}", value)
    return text.replace(RATE, "15s").replace("$__range", "5m")


def _values_at(prometheus: str) -> Values:
    def values(label: str) -> Sequence[str]:
        chosen = urllib.parse.urlencode({"match[]": "kvrelay_pages"})
        url = f"{prometheus}/api/v1/label/{label}/values?{chosen}"
        with urllib.request.urlopen(url) as answer:  # noqa: S310 (the operator's own)
            found: list[str] = json.load(answer)["data"]
        return found

    return values


if __name__ == "__main__":
    [_, asked] = sys.argv
    json.dump([perses(one, asked, _values_at(asked)) for one in DASHBOARDS], sys.stdout)
