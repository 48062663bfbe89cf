"""Requests of chosen lengths, and what must hold when a memory scenario has ended.

The scenarios are in `test_scenarios.py` by number. `p` page size, `L` prompt
tokens, `C` committed, `A` allocated, `P` protected length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.wire.load import PoolCounts
from tests.mem_cache.memory import Holder, Memory

TOKENS = list(range(1, 161))
OTHERS = [token + 1000 for token in TOKENS]

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
CACHED = pytest.mark.parametrize("cached", [True, False], ids=["radix", "none"])


def make(
    page_size: int,
    pages: int,
    *,
    rows: int = 4,
    window: int | None = None,
    window_pages: int = 0,
    ahead: int = 64,
    cached: bool = True,
) -> Memory:
    pools = [PoolShape("full", pages)]
    if window is not None:
        pools.append(PoolShape("window", window_pages, window))
    return Memory(pools, page_size, rows, pages * page_size, cached=cached, ahead=ahead)


def start(memory: Memory, tokens: Sequence[int], promised: int, known: int = -1) -> Holder:
    holder = memory.open(list(tokens), promised, known=known)
    assert holder is not None
    return holder


def compute(memory: Memory, holder: Holder, *counts: int) -> None:
    """One forward after the other, each to its end."""
    for count in counts:
        assert memory.compute(holder, count)
        memory.end_forward()


def generate(memory: Memory, holder: Holder, prompt: int, outputs: int, *, overlap: bool) -> None:
    """Forwards until the result is read that has the last output.

    With overlap each forward is launched before the result of the one before is read.
    """
    assert memory.compute(holder, prompt)
    for number in range(outputs):
        if overlap or number:
            assert memory.compute(holder, 1)
        memory.end_forward()
        memory.slide(holder)


def holding(
    memory: Memory, committed: int, allocated: int, *, protected: int = 0, tokens=TOKENS
) -> Holder:
    """A request of these lengths; nothing of it is in flight."""
    holder = start(memory, tokens, allocated)
    if protected:
        compute(memory, holder, protected)
        publish(memory, holder)
    if committed > protected:
        compute(memory, holder, committed - protected)
    assert memory.kv_cache.grow(holder.lease, allocated)
    assert lengths(holder.lease) == (protected, committed, allocated)
    return holder


def publish(memory: Memory, holder: Holder) -> None:
    """What is written; only what still runs fences its duplicates."""
    memory.kv_cache.sharing.publish(
        holder.lease, holder.ids(holder.written), memory.pending(holder)
    )


def end_all_forwards(memory: Memory) -> None:
    while memory.forwards:
        memory.end_forward()
    memory.reclaim()


def lengths(lease: Lease) -> tuple[int, int, int]:
    return (lease.cache_protected_len, lease.kv_committed_len, lease.kv_allocated_len)


def state(memory: Memory, holder: Holder) -> object:
    """All that a refusal might have changed."""
    lease = holder.lease
    pools = range(len(memory.kv_cache.shape.pools))
    tables = [lease.pages(pool).tolist() for pool in pools]
    return (lengths(lease), lease.row, lease.state, tables, memory.kv_cache.audit.counts())


def full(memory: Memory) -> PoolCounts:
    return memory.kv_cache.audit.page_counts()[0]


def times_freed(kv_cache: KVCacheManager, pages: Iterable[int], pool: int = 0) -> set[int]:
    """How often these pages became free; by the history of the account."""
    account = kv_cache.allocator.accounts[pool]
    return {account.history(int(page)).count("to FREE") for page in pages}


def assert_at_baseline(memory: Memory) -> None:
    """Everything has ended: nobody has anything, and all of it can be had again."""
    kv_cache = memory.kv_cache
    assert not [*memory.forwards, *memory.others, *memory.holders, *memory.saved]
    memory.check()
    for counts in kv_cache.audit.page_counts():
        assert counts.free + counts.cached_evictable == counts.total
        assert counts.promised == 0
    rows = kv_cache.audit.row_counts()
    assert rows.free == rows.total
    all_of_it = kv_cache.open("all of it", kv_cache.max_lease_tokens)
    assert all_of_it is not None
    if not any(kv_cache.shape.windowed):
        assert kv_cache.grow(all_of_it, kv_cache.max_lease_tokens)
    release_kv_cache(kv_cache, all_of_it, Outcome.ABORTED)
    kv_cache.audit.check_pages()
