"""`make docs-pictures`: draw the dashboards, `kvrelay top` and the live page under load.

A cluster is started, loaded, and scraped by a real Prometheus. Its workers are rolled to other
options on the way, and one is killed. Perses draws the dashboards in Chromium
(`docs.tools.dashboards.perses`). What is drawn is to be looked at before it is committed.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import click

from benchmarks.with_cluster import started
from docs.tools.pictures.boards import ROOT, draw_dashboards
from docs.tools.pictures.doors import ANYWHERE, Doors
from docs.tools.pictures.live_page import CHROMIUM, draw_live_page
from docs.tools.pictures.load import SERVE, kill_one, loaded, roll_all
from docs.tools.pictures.publish import publish
from docs.tools.pictures.top import draw_in_a_terminal, draw_once
from tests.cluster.prometheus import scraping

FOLDER: Final = ROOT / "docs" / "pictures"
_PROGRAMS: Final = ("prometheus", CHROMIUM, "npm", "node")
_RANGE: Final = "range.json"


@click.command(help=__doc__)
@click.option("--seconds", default=240, help="Under load, of which the dashboards show all.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=False)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Where Prometheus' data stay; those that are there are drawn anew, without a cluster.",
)
def main(seconds: int, folder: Path, data: Path | None) -> None:
    """Draw all of them."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise click.ClickException(f"needs {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        drawn = Path(scratch) / "drawn"
        drawn.mkdir()
        kept = data or Path(scratch) / "data"
        kept.mkdir(exist_ok=True)
        if not (kept / _RANGE).exists():
            _record(seconds, kept, drawn)
        asyncio.run(_draw_dashboards(kept, drawn))
        folder.mkdir(exist_ok=True)
        for picture in sorted(drawn.iterdir()):
            publish(picture, folder)


def _record(seconds: int, data: Path, drawn: Path) -> None:
    """Run the cluster for these seconds; what is drawn of it while it runs goes to `drawn`."""
    said = io.StringIO()
    with started([*ANYWHERE, *SERVE], said):
        begun, ended = asyncio.run(_watch(Doors.printed(said.getvalue()), seconds, data, drawn))
    (data / _RANGE).write_text(json.dumps({"begun": begun, "ended": ended}))


async def _watch(doors: Doors, seconds: int, data: Path, drawn: Path) -> tuple[int, int]:
    """A while of nothing but load, then a roll, then a death; when it began and ended.

    It takes longer than `seconds` where the roll does.
    """
    async with scraping(doors.metrics, data):
        begun = int(time.time())
        async with loaded(doors):
            await _until(begun + seconds / 6)
            await asyncio.to_thread(draw_in_a_terminal, doors.grpc, drawn / "top.svg")
            await asyncio.to_thread(draw_once, doors.grpc, drawn / "top-once.svg")
            await draw_live_page(doors.http, drawn)
            await _until(begun + seconds * 5 / 12)
            await roll_all(doors)
            await _until(begun + seconds * 5 / 6)
            await kill_one(doors)
            await asyncio.sleep(seconds / 6)
        return begun, int(time.time())


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.time()))


async def _draw_dashboards(data: Path, drawn: Path) -> None:
    shown = json.loads((data / _RANGE).read_text())
    async with scraping("127.0.0.1:9", data) as prometheus:
        await asyncio.to_thread(
            draw_dashboards, prometheus.url, shown["begun"], shown["ended"], drawn
        )


if __name__ == "__main__":
    main()
