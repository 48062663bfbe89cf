"""The model-based test finds faults of the host tier, too: so it would find one like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvrelay.mem_cache.host.host_loads import HostLoads
from kvrelay.mem_cache.host.host_page import HostPage, HostPageState
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.tier_copies import CopyEnded, PageMoves
from kvrelay.mem_cache.page_allocator import PageAllocator
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.wire.page_hash import PageHashes
from tests.known import known
from tests.mem_cache.host_model import HostModel
from tests.mem_cache.planting import BELOW_THE_DEVICE, Faults, find, in_little_memory, wrap
from tests.mem_cache.test_memory_model import MemoryMachine
from tests.pairwise import few

NOBODYS = -1
"""In pages: no token's."""

FAULTS = Faults()


class HostMachine(MemoryMachine):
    """With a host tier in any case, below a small device."""

    @in_little_memory(12, 40)
    def build(self, **options: Any) -> None:
        super().build(**options)

    @rule()
    def write_all(self) -> None:
        """Copy to the host what waits for that, up to the first copy back."""
        known(self.memory.host.tier).write_back()
        while self.memory.host.copies and self.memory.host.copies[0].moves.to_host:
            self.memory.host.finish_copy()

    @rule()
    def push_out(self) -> None:
        """Take all the room that there is, for a moment, and write into it.

        The index loses what nobody uses.
        """
        cache = self.memory.kv_cache
        counts = cache.audit.page_counts()[0]
        room = counts.free + counts.cached_evictable - counts.promised
        tokens = min(room * self.memory.page_size, self.longest)
        lease = cache.open_uncounted("all the room", tokens) if tokens > 0 else None
        if lease is not None:
            assert cache.grow(lease, tokens), "a promise was broken"
            for pool, contents in enumerate(self.memory.contents):
                contents[lease.pages(pool)] = NOBODYS
            release_kv_cache(cache, lease, Outcome.ABORTED)

    @precondition(lambda self: any(known(self.memory.host.tier).pages))
    @rule(pick=st.integers(0, 39))
    def bring_back_what_is_there(self, pick: int) -> None:
        """From the page picked on, the first that the device lacks: of random prompts few are."""
        pages = list(known(self.memory.host.tier).pages)
        for page in (*pages[pick % len(pages) :], *pages[: pick % len(pages)]):
            namespace, tokens = self.memory.host.prefix_of(page)
            if self.memory.host.bring_back(tokens, namespace):
                return

    @rule(pick=st.integers(0, 39))
    def there_and_back(self, pick: int) -> None:
        """One more is published, all go to the host and off the device; one begins its way back.

        Random steps seldom come so far.
        """
        if self.memory.holders:
            self.run_through(pick, publish=True)
            self.release(pick, Outcome.FINISHED)
        self.write_all()
        self.push_out()
        if any(known(self.memory.host.tier).pages):
            self.bring_back_what_is_there(pick)


@FAULTS.add
def freed_on_the_copy_thread(patch: pytest.MonkeyPatch) -> None:
    """A load's pages are given up by whoever copies, as soon as it begins."""

    def early(original: Any, host: HostModel) -> None:
        for copy in list(host.copies):
            if not copy.halves and not copy.moves.to_host:
                known(host.tier).finish(CopyEnded(copy.moves.operation, 0.0))
        original(host)

    wrap(patch, HostModel, "copy", early)


@FAULTS.add
def completion_of_a_cleared_operation_that_recreates_it(patch: pytest.MonkeyPatch) -> None:
    def recreate(
        original: Any, pages: HostPages, written: Sequence[HostPage], num_valid: int
    ) -> None:
        for page in written[:num_valid]:
            parent = page.parent
            is_free = page.key not in pages._pages
            is_held = parent is None or pages._pages.get(parent.key) is parent
            if page.state is HostPageState.GONE and is_free and is_held:
                page.state = HostPageState.WRITING
                pages._slots.gone.discard(page)
                pages._pages[page.key] = page
        original(pages, written, num_valid)

    wrap(patch, HostPages, "end_write", recreate)


@FAULTS.add
def host_page_visible_before_its_bytes_are(patch: pytest.MonkeyPatch) -> None:
    def at_once(original: Any, host: HostModel, moves: PageMoves) -> None:
        original(host, moves)
        if moves.to_host:
            host.early = [*getattr(host, "early", []), moves.operation]  # type: ignore[attr-defined]

    def tell(original: Any, tier: HostTier) -> None:
        original(tier)
        for operation in getattr(tier._writes._orders._stream, "early", []):
            tier.finish(CopyEnded(operation, 0.0))

    wrap(patch, HostModel, "start", at_once)
    wrap(patch, HostTier, "write_back", tell)


@FAULTS.add
def device_page_visible_before_its_bytes_are(patch: pytest.MonkeyPatch) -> None:
    def at_once(original: Any, loads: HostLoads, *args: Any) -> Any:
        load = original(loads, *args)
        while load is not None and not load.ended:
            loads.finish(CopyEnded(max(loads._running), 0.0))
        return load

    wrap(patch, HostLoads, "load", at_once)


@FAULTS.add
def hash_without_salt(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, PageHashes, "root", lambda original, hashes, namespace: original(hashes, ""))


@FAULTS.add
def copy_of_a_page_that_was_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PageAllocator, "times_allocated", lambda allocator, pool, pages: np.zeros(len(pages))
    )


@FAULTS.add
def free_what_a_copy_writes(patch: pytest.MonkeyPatch) -> None:
    """What is forgotten is free at once, though its copy has not ended."""

    def at_once(original: Any, pages: HostPages, top: HostPage) -> int:
        removed = original(pages, top)
        writing = [page for page in top.subtree() if page in pages._slots.gone and not page.pins]
        pages._slots.end_gone(writing)
        return int(removed)

    wrap(patch, HostPages, "_remove_subtree", at_once)


@FAULTS.add
def not_forgotten_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixLog, "forget", lambda log, token_ids, start, namespace: None)


@few(2)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_of_the_host_tier_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, HostMachine)


@pytest.mark.parametrize("walks", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_without_a_fault_nothing_is_found(walks: int):
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(HostMachine, settings=settings(BELOW_THE_DEVICE, max_examples=walks))
