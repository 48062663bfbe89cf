"""Draw the dashboards and `kvrelay top` of a cluster under load: `make docs-pictures`.

A cluster is started, loaded, and scraped by a real Prometheus; Perses draws the dashboards in
Chromium (`docs.tools.dashboards.perses`). What is drawn is to be looked at before it is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from benchmarks.with_cluster import started
from tests.cluster.prometheus import MISSING, scraping

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs" / "pictures"
RENDERING: Final = ROOT / "docs" / "tools" / "dashboards" / "rendering"
KVRELAY: Final = (sys.executable, "-m", "kvrelay.deploy")
ANYWHERE: Final = "127.0.0.1:0"
SERVE: Final = ("--decode=2", "--kv-memory=24MiB", "--verify-pages=sample", "--threads=1")
"""A small pool, so that it fills, and requests are retracted."""
LOADS: Final = (
    ("--shape=256/96", "--concurrency=6"),
    ("--shape=40/200", "--concurrency=6"),
)
COLUMNS: Final = 100
COLOURS: Final = 64
_METRICS_LINE: Final = re.compile(r"^  metrics +.*?(127\.0\.0\.1:\d+)", re.MULTILINE)


@click.command(help=__doc__)
@click.option("--seconds", default=90, help="Under load, of which the dashboards show all.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=False)
def main(seconds: int, folder: Path) -> None:
    """Draw all of them."""
    if MISSING:
        raise click.ClickException(MISSING)
    folder.mkdir(exist_ok=True)
    said = io.StringIO()
    doors = [f"--{door}={ANYWHERE}" for door in ("grpc", "http", "admin", "metrics")]
    with started([*doors, *SERVE], said) as cluster:
        found = _METRICS_LINE.search(said.getvalue())
        if found is None:
            raise click.ClickException(f"no metrics address:\n{said.getvalue()}")
        with _loaded(cluster.target, seconds):
            asyncio.run(_draw(found[1], cluster.target, seconds, folder))


@contextlib.contextmanager
def _loaded(target: str, seconds: int) -> Iterator[None]:
    """Some clients call the cluster as long as this context."""
    bench = [*KVRELAY, "bench", "--target", target, "--requests", "100000"]
    bench += ["--max-seconds", str(2 * seconds + 60)]
    loads = [
        subprocess.Popen([*bench, *load], stdout=subprocess.DEVNULL)  # noqa: S603 (our own command)
        for load in LOADS
    ]
    try:
        yield
    finally:
        for load in loads:
            load.terminate()
        for load in loads:
            load.wait()


async def _draw(controller: str, target: str, seconds: int, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        async with scraping(controller, Path(scratch)) as prometheus:
            begun = int(time.time())
            await asyncio.sleep(seconds)
            await asyncio.to_thread(_draw_top, target, folder / "top.svg")
            ended = int(time.time())
            await asyncio.to_thread(_draw_dashboards, prometheus.url, begun, ended, folder)


def _draw_top(target: str, path: Path) -> None:
    """What `kvrelay top` shows, as a terminal would."""
    command = [*KVRELAY, "top", "--once", "--server", target]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    shown = subprocess.run(  # noqa: S603 (our own command)
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    svg = console.export_svg(title="kvrelay top", theme=DIMMED_MONOKAI)
    # Its font would be fetched from another host.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


def _draw_dashboards(prometheus: str, begun: int, ended: int, folder: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise click.ClickException("needs node and npm")
    if not (RENDERING / "node_modules").exists():
        _run(npm, "--prefix", RENDERING, "install", "--legacy-peer-deps", "--silent")
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "dashboards.json"
        module = (sys.executable, "-m", "docs.tools.dashboards.perses", prometheus)
        spec.write_bytes(_run(*module))
        _run(node, RENDERING / "render.mjs", spec, begun, ended, scratch)
        for drawn in sorted(Path(scratch).glob("*.png")):
            with Image.open(drawn) as picture:
                few = picture.convert("RGB").quantize(COLOURS)
                few.save(folder / drawn.name.removeprefix("kvrelay-"), optimize=True)


def _run(*command: str | int | Path) -> bytes:
    """What a command prints; CalledProcessError if it fails."""
    told = [str(one) for one in command]
    return subprocess.run(told, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603


if __name__ == "__main__":
    main()
