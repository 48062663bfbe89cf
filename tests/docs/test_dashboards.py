"""The dashboards as files, and what they ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.tools.dashboards.grafana import files
from docs.tools.dashboards.pages import DASHBOARDS
from docs.tools.dashboards.perses import perses, with_values
from docs.tools.dashboards.spec import STATES, TOTAL, Dashboard, Draws
from kvrelay.mem_cache.host.host_pages import HOST
from kvrelay.mem_cache.storage.storage_pages import STORAGE
from kvrelay.wire.load import PAGE_STATES
from tests.monitored import check_exported

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "charts" / "dashboards"
MOST_COLUMNS = 24


def panels_of(one: Dashboard) -> list[dict[str, Any]]:
    shipped = json.loads((SHIPPED / f"{one.uid.removeprefix('kvrelay-')}.json").read_text())
    return [panel for panel in shipped["panels"] if panel["type"] != "row"]


def test_the_shipped_files_are_those_of_the_code():
    shipped = {path.name: path.read_text() for path in SHIPPED.iterdir()}
    assert shipped == dict(files(DASHBOARDS)), "make docs-generated"


@pytest.mark.parametrize("one", DASHBOARDS, ids=lambda one: one.uid)
def test_queries_name_what_is_exported(one: Dashboard):
    for panel in one.panels:
        for query in panel.queries:
            check_exported(query.expr)
    for variable in one.variables:
        check_exported(variable.metric)


@pytest.mark.parametrize("one", DASHBOARDS, ids=lambda one: one.uid)
def test_every_panel_and_query_arrives_in_the_file(one: Dashboard):
    shipped = [
        (panel["title"], panel["description"], [target["expr"] for target in panel["targets"]])
        for panel in panels_of(one)
    ]
    assert shipped == [
        (panel.title, panel.about, [query.expr for query in panel.queries]) for panel in one.panels
    ]
    for panel in panels_of(one):
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= MOST_COLUMNS, panel["title"]


@pytest.mark.parametrize("pool", ["rows", HOST, f"{HOST}_window", STORAGE])
def test_what_is_below_the_device_is_not_counted_as_the_device_s(pool: str):
    left_out = {
        pattern
        for panel in DASHBOARDS[0].panels
        for query in panel.queries
        for pattern in re.findall(r'pool!~"([^"]*)"', query.expr)
    }
    assert left_out
    assert all(re.fullmatch(pattern, pool) for pattern in left_out)


@pytest.mark.parametrize("pool", [HOST, f"{HOST}_window", f"{HOST}_draft_window", STORAGE])
def test_the_states_of_each_pool_below_the_device_are_in_one_panel(pool: str):
    panels = {
        panel.title
        for panel in DASHBOARDS[0].panels
        for query in panel.queries
        for pattern in re.findall(r'pool=~?"([^"]*)",state=', query.expr)
        if re.fullmatch(pattern, pool)
    }
    assert len(panels) == 1


def test_states_are_stacked_and_the_pool_is_a_line_over_them():
    [panel] = [one for one in panels_of(DASHBOARDS[0]) if one["title"] == "Pages of $worker"]
    assert panel["repeat"] == "worker"
    assert panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    [line] = [
        one["properties"]
        for one in panel["fieldConfig"]["overrides"]
        if one["matcher"]["options"] == "pool"
    ]
    assert {"id": "custom.stacking", "value": {"mode": "none", "group": "states"}} in line


def test_a_state_has_one_color_everywhere():
    style = (ROOT / "router" / "doors" / "http" / "live_page.html").read_text()
    for state, color in STATES.items():
        assert f"--{state}: {color};" in style
    assert set(STATES) == set(PAGE_STATES)
    [panel] = [one for one in panels_of(DASHBOARDS[0]) if one["title"] == "Pages of $worker"]
    stacked = [
        target["expr"].partition('state="')[2].partition('"')[0] for target in panel["targets"]
    ]
    assert stacked == [*STATES, ""], "what new requests can have is at the top"
    overrides = {
        one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"]
        for one in panel["fieldConfig"]["overrides"]
        if one["matcher"]["id"] == "byFrameRefID"
    }
    assert [overrides[ref] for ref in "ABCDEFG"] == list(STATES.values())


def test_the_pool_is_a_threshold_where_all_is_stacked():
    asked: list[str] = []

    def number(expr: str) -> float:
        asked.append(expr)
        return 546.0

    drawn = perses(DASHBOARDS[0], "http://127.0.0.1:9090", lambda label: ["a"], number)
    [panel] = [
        one["spec"]
        for one in drawn["spec"]["panels"].values()
        if one["spec"]["display"]["name"] == "Pages of a"
    ][:1]
    [step] = panel["plugin"]["spec"]["thresholds"]["steps"]
    assert (step["name"], step["value"]) == (TOTAL, 546.0)
    assert all("kvrelay_pool_pages" in expr and "$" not in expr for expr in asked)
    assert len(panel["queries"]) == len(STATES)


@pytest.mark.parametrize("one", DASHBOARDS, ids=lambda one: one.uid)
def test_the_browser_is_asked_to_draw_the_same_queries(one: Dashboard):
    drawn = perses(one, "http://127.0.0.1:9090", lambda label: [f"{label}-a", f"{label}-b"])
    asked = {
        query["spec"]["plugin"]["spec"]["query"]
        for panel in drawn["spec"]["panels"].values()
        for query in panel["spec"]["queries"]
    }
    wanted = set()
    for panel in one.panels:
        for value in ("a", "b") if panel.repeat else ("",):
            chosen = {panel.repeat: f"{panel.repeat}-{value}"} if value else {}
            wanted |= {
                with_values(query.expr, chosen)
                for query in panel.queries
                if panel.draws is not Draws.AREAS or query.legend != TOTAL
            }
    assert asked == wanted
    assert not any("$" in query for query in asked)
    placed = [
        item["content"]["$ref"].rpartition("/")[2]
        for layout in drawn["spec"]["layouts"]
        for item in layout["spec"]["items"]
    ]
    assert placed == list(drawn["spec"]["panels"])
