"""A dashboard as Grafana's JSON."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from docs.tools.dashboards.spec import TOTAL, Dashboard, Draws, Panel, Query, Variable

_SOURCE: Final = common_models.DataSourceRef(type_val="prometheus", uid="$datasource")
_HEIGHT: Final = 8
_PANELS_IN_A_ROW: Final = 2
_COLUMNS: Final = 24


def grafana_json(one: Dashboard) -> str:
    """The text of the file that Grafana imports."""
    board = (
        builders.Dashboard(one.title)
        .uid(one.uid)
        .description(one.about)
        .tags(["kvrelay"])
        .timezone("browser")
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .with_variable(builders.DatasourceVariable("datasource").type("prometheus"))
    )
    for variable in one.variables:
        board = board.with_variable(_variable(variable))
    top = 0
    for row in one.rows:
        board = board.with_row(builders.Row(row.title).grid_pos(_place(0, top, _COLUMNS, 1)))
        top += 1
        left = 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _HEIGHT
            place = _place(left, top, panel.width, _HEIGHT)
            board = board.with_panel(_panel(panel).grid_pos(place))
            left += panel.width
        top += _HEIGHT
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _place(left: int, top: int, width: int, height: int) -> models.GridPos:
    return models.GridPos(x=left, y=top, w=width, h=height)


def _links() -> builders.DashboardLink:
    """To the other dashboards, with the same time and variables."""
    return (
        builders.DashboardLink("kvrelay")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["kvrelay"])
        .include_vars(True)
        .keep_time(True)
    )


def _variable(variable: Variable) -> builders.QueryVariable:
    every = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        builders.QueryVariable(variable.name)
        .datasource(_SOURCE)
        .query(f"label_values({variable.metric}, {variable.label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        # Series without the label, too: a static configuration may not give any.
        .all_value(".*")
        .current(every)
    )


def _panel(panel: Panel) -> Any:
    built = _DRAWN[panel.draws](panel)
    built = built.title(panel.title).description(panel.about).datasource(_SOURCE)
    for query, ref in zip(panel.queries, string.ascii_uppercase, strict=False):
        built = built.with_target(_query(panel, query).ref_id(ref))
        if query.color:
            built = built.override_by_query(ref, [_fixed(query.color)])
    if panel.repeat:
        built = built.repeat(panel.repeat).repeat_direction("h").max_per_row(_PANELS_IN_A_ROW)
    return built


def _query(panel: Panel, query: Query) -> prometheus.Dataquery:
    built = prometheus.Dataquery().datasource(_SOURCE).expr(query.expr).legend_format(query.legend)
    match panel.draws:
        case Draws.HEATMAP:
            return built.format(prometheus_models.PromQueryFormat.HEATMAP).range()
        case Draws.TABLE:
            built = built.format(prometheus_models.PromQueryFormat.TABLE)
            return built.instant()
        case Draws.NUMBERS:
            return built.instant()
        case _:
            return built.range()


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    built = timeseries.Panel().unit(panel.unit).min(0).legend(legend).tooltip(tooltip)
    return built.show_points(common_models.VisibilityMode.NEVER).fill_opacity(0)


def _areas(panel: Panel) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("states")
    built = _lines(panel).stacking(stacking).fill_opacity(75).line_width(0)
    line = [
        models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "states"}),
        models.DynamicConfigValue("custom.fillOpacity", 0),
        models.DynamicConfigValue("custom.lineWidth", 2),
    ]
    return built.override_by_name(TOTAL, line)


def _fixed(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _heatmap(panel: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(color.scheme("Blues").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .cell_gap(1)
    )


def _numbers(panel: Panel) -> stat.Panel:
    steps = [models.Threshold(color="green"), models.Threshold(value=0.5, color="red")]
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    return stat.Panel().unit(panel.unit).thresholds(thresholds)


def _table(_: Panel) -> table.Panel:
    hidden = {"Time": True, "Value": True, "__name__": True, "job": True, "instance": True}
    organize = models.DataTransformerConfig(
        id_val="organize", options={"excludeByName": hidden, "indexByName": {}}
    )
    return table.Panel().with_transformation(organize)


_DRAWN: Final[dict[Draws, Callable[[Panel], Any]]] = {
    Draws.LINES: _lines,
    Draws.AREAS: _areas,
    Draws.HEATMAP: _heatmap,
    Draws.NUMBERS: _numbers,
    Draws.TABLE: _table,
}


def files(dashboards: tuple[Dashboard, ...]) -> Iterator[tuple[str, str]]:
    """The name and the text of each file."""
    for one in dashboards:
        yield f"{one.uid.removeprefix('kvrelay-')}.json", grafana_json(one)
