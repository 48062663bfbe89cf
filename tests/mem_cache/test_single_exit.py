"""Only `release_kv_cache` ends a lease, an allocator alone moves pages, and `Rows` lengths."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvrelay.mem_cache.leases.rows import Rows

ROOT = Path(__file__).parents[2]
ROOMS = (
    "mem_cache",
    "kv_transfer",
    "model_runner",
    "engine",
    "prefill_worker",
    "decode_worker",
    "aggregated_worker",
)
INDEXES = {"mem_cache/prefix/no_prefix_index.py"}
ALLOCATOR = "mem_cache/page_allocator.py"
HOST_SLOTS = "mem_cache/host/host_slots.py"
"""It moves pages of the host's pools, which have accounts of their own."""
MANAGER = "mem_cache/kv_cache_manager.py"
ROWS = "mem_cache/leases/rows.py"
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@cache
def nodes() -> tuple[tuple[Path, ast.AST], ...]:
    """Every node of every source file, read once."""
    return tuple((path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))


@cache
def users() -> dict[str, set[str]]:
    """Files by the attributes, of anything, that they read."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, node in nodes():
        if isinstance(node, ast.Attribute):
            found[node.attr].add(str(path.relative_to(ROOT)))
    return found


def users_of(*attributes: str) -> set[str]:
    """Files that read one of these attributes of anything."""
    return set().union(*(users()[name] for name in attributes))


# Attributes, and all files that may read one of them, but for those that define them.
USERS = {
    "end_lease": {"mem_cache/release.py"},
    "close_lease": {"mem_cache/release.py"},
    "save": {"mem_cache/release.py"},
    "begin_lease": {MANAGER, "mem_cache/leases/publishing.py"},
    "LEASE QUARANTINE INDEX SESSION": {ALLOCATOR, HOST_SLOTS, "mem_cache/audit.py"},
    "accounts": {ALLOCATOR, "mem_cache/audit.py"},
    "move": {ALLOCATOR, HOST_SLOTS},
    "free_after": {
        "mem_cache/leases/lease_lengths.py",
        "mem_cache/leases/lease_table.py",
        "mem_cache/leases/publishing.py",
    },
    "move_to_index": {"mem_cache/leases/publishing.py"},
    "move_to_session": {"mem_cache/leases/lease_table.py"},
    "move_from_session": {"mem_cache/leases/lease_table.py"},
    "move_to": {"mem_cache/leases/lease_table.py"},
    "take_row": {"mem_cache/leases/lease_table.py"},
    "evict": INDEXES | {ALLOCATOR},
    "unlock": INDEXES
    | {"mem_cache/prefix/radix_tree.py"}
    | {ALLOCATOR, MANAGER, "mem_cache/leases/publishing.py"},
    "SAVED": {
        "mem_cache/audit.py",
        "mem_cache/leases/lease_table.py",
        "mem_cache/release.py",
        "mem_cache/session_memory.py",
        "engine/scheduler/session_turns.py",
    },
}
DEFINED_IN = {
    "LEASE QUARANTINE INDEX SESSION": "mem_cache/account.py",
    "move": "mem_cache/account.py",
    "accounts": ALLOCATOR,
    "move_to": "mem_cache/leases/lease.py",
    "SAVED": "mem_cache/leases/lease.py",
}


@pytest.mark.parametrize("attributes", USERS)
def test_only_these_files_may(attributes: str):
    defined_in = DEFINED_IN.get(attributes)
    assert users_of(*attributes.split()) - {defined_in} == USERS[attributes] - {defined_in}


def test_the_account_is_reached_through_nobody_else():
    """What `KVCacheManager` is made of is its own; each part is given those that it works with."""
    parts = ("_allocator", "_promises", "_leases", "_lengths", "_ledger", "_shape", "_rows")
    reached = {
        f"{path.name}: {ast.unparse(node)}"
        for path, node in nodes()
        if isinstance(node, ast.Attribute)
        and node.attr in parts
        and ast.unparse(node.value) != "self"
    }
    assert not reached


def test_other_rooms_use_of_the_account_what_moves_nothing():
    """They may reclaim what has ended, and read counts; leases they reach by the manager alone."""
    used = {
        (node.value.attr, node.attr)
        for path, node in nodes()
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in {"allocator", "leases", "promises", "ledger"}
        and not path.is_relative_to(ROOT / "mem_cache")
        and "kv_cache" in ast.unparse(node.value.value)
    }
    assert used == {
        ("allocator", name) for name in ("reclaim", "quarantine_counts", "quarantined_since")
    }


def test_only_rows_changes_lengths_promises_and_page_tables():
    arrays = {
        name for name, value in vars(Rows(1, 1, 1, 1)).items() if isinstance(value, np.ndarray)
    }
    assert {"committed", "_committed", "page_tables", "_page_tables"} <= arrays
    knows_no_leases = ROOT / "mem_cache" / "storage"
    written = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path, node in nodes()
        if isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and path != ROOT / ROWS
        and path.is_relative_to(ROOT / "mem_cache")
        and not path.is_relative_to(knows_no_leases)
        and any(isinstance(one, ast.Attribute) and one.attr in arrays for one in ast.walk(node))
    }
    assert not written


def test_nothing_in_mem_cache_reads_what_is_private_to_another():
    reached = {
        f"{path.name}: {ast.unparse(node)}"
        for path, node in nodes()
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and path.is_relative_to(ROOT / "mem_cache")
        and ast.unparse(node.value) not in {"self", "cls"}
    }
    assert not reached


def test_the_engine_releases_in_one_place():
    calls = {
        str(path.relative_to(ROOT))
        for path, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "release_kv_cache"
    }
    leases_of_sessions_and_loads = {
        "mem_cache/session_memory.py",
        "mem_cache/host/host_loads.py",
    }
    assert calls == {"engine/scheduler/context.py"} | leases_of_sessions_and_loads
