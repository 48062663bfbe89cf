"""The audit finds pages and rows that were lost or have two owners, and names them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvrelay.mem_cache.audit import Audit
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.leases.lease_lengths import LeaseLengths
from kvrelay.mem_cache.leases.lease_table import LeaseTable
from kvrelay.mem_cache.leases.ledger import Ledger
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.shape import CacheShape, PoolShape


class Parts:
    """What a `KVCacheManager` is made of, so that a test can do what it never does."""

    def __init__(self) -> None:
        shape = CacheShape((PoolShape("full", 16),), page_size=4, ahead=64)
        self.index = RadixTree(4, [None])
        self.ledger = Ledger.make(shape, self.index, 4, 64, time.monotonic)
        self.allocator, self.rows = self.ledger.allocator, self.ledger.rows
        self.leases = LeaseTable(self.ledger, LeaseLengths(self.ledger))
        self.audit = Audit(self.ledger, self.leases)


def test_audit_names_a_lost_page_and_its_history():
    parts = Parts()
    page = int(parts.allocator.allocate(0, [("culprit", 1)])[0])
    with pytest.raises(ConservationError, match=rf"page {page} has 0 owners: culprit: FREE to"):
        parts.audit.check_pages()


def test_audit_finds_a_page_that_the_index_was_never_given():
    parts = Parts()
    parts.audit.check_pages()
    parts.index.insert(np.arange(4, dtype=np.int32), [np.array([3], np.int32)])
    with pytest.raises(ConservationError, match="17 of 16"):
        parts.audit.check()


def test_audit_finds_a_page_in_two_tables():
    parts = Parts()
    pages = parts.allocator.allocate(0, [("first", 1)])
    for holder in ("first", "second"):
        lease = parts.leases.begin_lease(holder, "", 4, [0], None)
        parts.rows.replace_page(0, lease.row, 0, int(pages[0]))
        parts.rows.set_allocated(lease.row, 4)
    with pytest.raises(ConservationError, match=f"page {pages[0]} has 2 owners"):
        parts.audit.check_pages()


def test_audit_finds_a_lost_row():
    parts = Parts()
    parts.allocator.free_rows.pop()
    with pytest.raises(ConservationError, match="3 of 4"):
        parts.audit.check()


def test_audit_finds_promises_that_cannot_be_kept():
    parts = Parts()
    parts.leases.begin_lease("a", "", 80, [20], None)
    with pytest.raises(ConservationError, match="20 pages promised"):
        parts.audit.check()
