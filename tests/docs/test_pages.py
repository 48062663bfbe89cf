"""What keeps the documentation true: links, named paths, and parts that come from the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tools.generated import with_part
from docs.tools.grpc_api import markdown
from docs.tools.pictures.publish import MAX_BYTES
from kvrelay.deploy.controller.supervision.controller_metrics import METRICS as CONTROLLER_METRICS
from kvrelay.engine.scheduler.metrics import METRICS as WORKER_METRICS
from kvrelay.router.metrics import METRICS as ROUTER_METRICS

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "node_modules" not in page.parts
]
NOT_TRACKED = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "node_modules", "site", "*.egg-info"
)


def test_a_broken_link_anchor_or_path_fails_the_build(tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_TRACKED)
    with (copy / "docs" / "security.md").open("a") as page:
        page.write("[a](no-such-page.md) [b](metrics.md#no-such-part) [c](../tests/no_such.py)")
        page.write(" `router/no_such_file.py`\n")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 1
    for wrong in ("no-such-page.md", "#no-such-part", "../tests/no_such.py", "no_such_file.py"):
        assert wrong in built.stderr, built.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_metrics_that_there_are(page: Path):
    tables = (ROUTER_METRICS, CONTROLLER_METRICS, WORKER_METRICS)
    there = {metric.name for table in tables for metric in table}
    assert set(re.findall(r"\bkvrelay_\w+", page.read_text())) <= there


def test_pages_that_are_read_first_are_short():
    """Bytes; details go behind them."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    assert max(len(release.encode()) for release in releases) <= 10_000
    assert (ROOT / "docs" / "gpu.md").stat().st_size <= 8_000


def test_the_architecture_names_the_rooms_that_the_router_imports():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    row = re.search(r"^\| `router/` .* any room but ([^;]*);", page, re.MULTILINE)
    assert row
    sources = "".join(path.read_text() for path in sorted((ROOT / "router").rglob("*.py")))
    rooms = set(re.findall(r"^\s*(?:from|import) kvrelay\.(\w+)", sources, re.MULTILINE))
    rooms = {"proto" if room == "v1" else room for room in rooms - {"router"}}
    assert set(re.findall(r"`(\w+)`", row[1])) == rooms


def test_a_part_is_replaced_where_it_stands():
    page = "before\n<!-- generated: x -->\nold\n<!-- end generated -->\nafter\n"
    new = "before\n<!-- generated: x -->\n\nnew\n\n<!-- end generated -->\nafter\n"
    assert with_part(page, "x", "new") == new
    assert with_part(new, "x", "new") == new
    with pytest.raises(ValueError, match="there is no"):
        with_part(page, "y", "new")


def test_the_api_has_comments_types_and_links():
    page = markdown()
    assert "The public service: what clients of a kvrelay cluster speak." in page
    assert "stream of [GenerateResponse](#generateresponse)" in page
    assert "| `top_p` | optional float | The fewest likeliest tokens whose probabilities" in page
    assert "| `logit_bias` | map of uint32 to float | " in page
    assert "Oneof `prompt`." in page
    assert "### DrainWorkerResponse.Phase" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_pictures_that_are_there_and_small(page: Path):
    for shown in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text()):
        picture = page.parent / shown
        assert picture.is_file(), f"{page.name} shows {shown}"
        assert picture.stat().st_size <= MAX_BYTES, f"{shown} is large"
