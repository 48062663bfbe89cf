"""Write what comes from the code, parts of pages and dashboards: `make docs-generated`.

Such a part stands between `<!-- generated: NAME -->` and `<!-- end generated -->`. With `--check`
nothing is written, and the exit status is 1 if a page or a file differs from what the code says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from docs.tools import doors, grpc_api, metrics, models
from docs.tools.dashboards import grafana
from docs.tools.dashboards.pages import DASHBOARDS
from kvrelay.deploy.commands import option_table

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final[dict[str, tuple[str, Callable[[], str]]]] = {
    "attack-bounds": ("docs/security.md", doors.attack_bounds),
    "controller-metrics": ("docs/metrics.md", metrics.controller_metrics),
    "door-rules": ("docs/security.md", doors.door_rules),
    "grpc-api": ("docs/grpc-api.md", grpc_api.markdown),
    "model-modes": ("docs/models.md", models.modes),
    "options": ("docs/configuration.md", option_table.markdown),
    "refused-models": ("docs/models.md", models.refused),
    "router-metrics": ("docs/metrics.md", metrics.router_metrics),
    "served-models": ("docs/models.md", models.served),
    "worker-metrics": ("docs/metrics.md", metrics.worker_metrics),
}
"""By name, the page that has the part, and what makes it."""

DASHBOARD_FOLDER: Final = "deploy/charts/dashboards"
"""Has nothing but the dashboards' JSON."""


def with_part(page: str, name: str, text: str) -> str:
    """The page with the part replaced; ValueError if it has no such part."""
    begin, end = f"<!-- generated: {name} -->", "<!-- end generated -->"
    part = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not part.search(page):
        raise ValueError(f"there is no {begin}")
    return part.sub(lambda _: f"{begin}\n\n{text.strip()}\n\n{end}", page, count=1)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail if a page is out of date.")
def main(check: bool) -> None:
    """Write the parts and the dashboards, or say which pages and files differ."""
    stale = list(_dashboards(check))
    for name, (path, make) in PARTS.items():
        page = (ROOT / path).read_text()
        fresh = with_part(page, name, make())
        if fresh != page:
            stale.append(path)
            if not check:
                (ROOT / path).write_text(fresh)
    if stale and check:
        raise click.ClickException(f"out of date: {', '.join(stale)}: make docs-generated")
    click.echo("\n".join(f"wrote {path}" for path in stale) or "the pages say what the code says")


def _dashboards(check: bool) -> Iterator[str]:
    """Write the dashboards unless it is a check; yields the paths of those that differ."""
    folder = ROOT / DASHBOARD_FOLDER
    fresh = dict(grafana.files(DASHBOARDS))
    for name in sorted(fresh.keys() | {path.name for path in folder.iterdir()}):
        path = folder / name
        if path.is_file() and path.read_text() == fresh.get(name):
            continue
        yield f"{DASHBOARD_FOLDER}/{name}"
        if check:
            continue
        if name in fresh:
            path.write_text(fresh[name])
        else:
            path.unlink()


if __name__ == "__main__":
    main()
