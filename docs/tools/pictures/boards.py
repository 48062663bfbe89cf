"""Pictures of the dashboards, drawn by Perses in a browser from what a Prometheus has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
RENDERING: Final = ROOT / "docs" / "tools" / "dashboards" / "rendering"


def draw_dashboards(prometheus: str, begun: int, ended: int, folder: Path) -> None:
    """One picture a dashboard, of these seconds since 1970.

    Raises:
        subprocess.CalledProcessError: a page raised an error.
    """
    _install()
    spec = folder / "dashboards.json"
    module = (sys.executable, "-m", "docs.tools.dashboards.perses", prometheus)
    spec.write_bytes(_run(*module, begun, ended))
    sys.stderr.buffer.write(_run("node", RENDERING / "render.mjs", spec, begun, ended, folder))
    spec.unlink()
    for drawn in folder.glob("kvrelay-*.png"):
        drawn.rename(folder / drawn.name.removeprefix("kvrelay-"))


def _install() -> None:
    """Have npm install what draws, unless it has done so for this list of packages."""
    wanted = (RENDERING / "package.json").read_text()
    installed = RENDERING / "node_modules" / ".installed"
    if installed.exists() and installed.read_text() == wanted:
        return
    told = ("install", "--legacy-peer-deps", "--no-package-lock", "--silent")
    _run("npm", "--prefix", RENDERING, *told)
    installed.write_text(wanted)


def _run(*command: str | int | Path) -> bytes:
    """What a command prints; CalledProcessError if it fails."""
    told = [str(one) for one in command]
    return subprocess.run(told, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603
