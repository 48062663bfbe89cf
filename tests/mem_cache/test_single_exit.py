"""Nothing but `release_kv_cache` ends a lease, and nothing but the ledger moves a page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("mem_cache", "kv_transfer", "model_runner", "engine", "prefill_worker", "decode_worker")
INDEXES = {"mem_cache/no_prefix_index.py"}
BOOKS = {"mem_cache/books.py", "mem_cache/audit.py", "mem_cache/turns.py"}
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]


def users_of(*attributes: str) -> set[str]:
    """Files that read one of these attributes of anything."""
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in attributes
    }


@pytest.mark.parametrize(
    ("attributes", "allowed"),
    [
        (("give_back",), {"mem_cache/release.py"}),
        (("leave_lease",), {"mem_cache/ledger.py"}),
        (("enter_lease",), {"mem_cache/ledger.py", "mem_cache/sharing.py"}),
        (("LEASE", "QUARANTINE", "INDEX", "SESSION"), BOOKS | {"mem_cache/ledger.py"}),
        (("move_each",), {"mem_cache/books.py"}),
        (("move_to",), {"mem_cache/ledger.py", "mem_cache/turns.py"}),
        (("evict",), INDEXES | {"mem_cache/books.py"}),
        (
            ("unlock",),
            INDEXES | {"mem_cache/books.py", "mem_cache/ledger.py", "mem_cache/sharing.py"},
        ),
        (("_books",), {"mem_cache/ledger.py"}),
        (
            ("SAVED",),
            {
                "mem_cache/audit.py",
                "mem_cache/ledger.py",
                "mem_cache/release.py",
                "mem_cache/session.py",
                "mem_cache/turns.py",
            },
        ),
    ],
    ids=[
        "give_back",
        "leave_lease",
        "enter_lease",
        "owners",
        "moves",
        "states",
        "evict",
        "unlock",
        "books",
        "saved",
    ],
)
def test_only_these_files_may(attributes: tuple[str, ...], allowed: set[str]):
    users = users_of(*attributes) - {"mem_cache/account.py", "mem_cache/lease.py"}
    assert users == allowed


def test_the_engine_releases_in_one_place():
    calls = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "release_kv_cache"
    }
    assert calls == {"engine/core.py", "mem_cache/session.py"}
