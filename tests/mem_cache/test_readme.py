"""What the page on the account says of owners and lengths is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrelay.mem_cache.account import Owner
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.publishing import PrefixSharing

PAGE = Path(__file__).parents[2] / "mem_cache" / "README.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its own heading."""
    part = PAGE.read_text().partition(f"## {heading}\n")[2]
    table = re.search(r"^\| ---.*\n((?:\|.*\n)+)", part, re.MULTILINE)
    assert table
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_page_has_every_owner():
    assert [owner.strip("`") for owner, _ in rows("Owners")] == [one.name for one in Owner]


@pytest.mark.parametrize("row", rows("A lease, as intervals"), ids=lambda row: row[0])
def test_a_length_is_raised_by_what_its_docstring_names(row: list[str]):
    length, raised, lowered = row
    docstring = getattr(Lease, length.strip("`")).__doc__
    assert names(docstring.lower().partition("raised by")[2]) == names(raised)
    parts = (KVCacheManager, LeaseLengths, LeaseTable, PrefixSharing)
    for name in names(raised) | names(lowered):
        assert any(hasattr(part, name) for part in parts), name
