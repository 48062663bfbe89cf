"""What keeps the lab short enough to be read: its pages' index, order and size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "docs" / "lab"
PAGES = sorted(page for page in LAB.glob("*.md") if page.name != "index.md")
MAX_BYTES = 60_000
"""What all pages together may have."""
MAX_LINES = 10
"""What a finding may have, without its heading, empty lines, and what only draws a table."""
MAX_WIDTH = 130
"""Columns of a line of prose, or ten lines would be no bound."""


def findings(page: Path) -> list[tuple[str, list[str]]]:
    """Each finding's heading, and its lines that count."""
    pieces = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    return [
        (heading, [line for line in lines if line and not re.fullmatch(r"[| :-]+", line)])
        for heading, *lines in (piece.splitlines() for piece in pieces)
    ]


def test_the_index_and_the_site_have_every_page_once():
    index = re.findall(r"^\| \[[^]]+\]\((\S+)\)", (LAB / "index.md").read_text(), re.MULTILINE)
    site = re.findall(r": lab/(\S+)$", (LAB.parents[1] / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(index) == sorted(site) == [page.name for page in PAGES]


def test_all_pages_together_are_short():
    assert sum(page.stat().st_size for page in LAB.glob("*.md")) < MAX_BYTES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_findings_are_dated_newest_first_and_short(page: Path):
    found = findings(page)
    dates = [heading.partition(": ")[0] for heading, _ in found]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", date) for date in dates), dates
    assert dates == sorted(dates, reverse=True)
    assert [heading for heading, lines in found if len(lines) > MAX_LINES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_heading_stands_alone_and_lines_are_not_long(page: Path):
    """A merge that keeps both sides can glue a heading to a paragraph."""
    text = page.read_text()
    assert not re.search(r"[^\n]\n## |^## .*\n[^\n]", text, re.MULTILINE)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in prose if len(line) > MAX_WIDTH and " " in line.strip()] == []
