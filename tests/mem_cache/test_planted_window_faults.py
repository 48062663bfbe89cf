"""The model-based test finds faults of windows on the host, too: so it would find one like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from kvrelay.mem_cache.host.host_page import HostPage, HostPart
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.host_windows import HostWindow
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.radix_tree import RadixWindows
from tests.known import known
from tests.mem_cache.planting import BELOW_THE_DEVICE, Faults, find, wrap
from tests.mem_cache.test_planted_host_faults import NOBODYS, HostMachine
from tests.pairwise import few

FAULTS = Faults()


class WindowMachine(HostMachine):
    """With windows above a host, which has less room for their parts than for pages."""

    @initialize(
        kind=st.sampled_from(["hybrid", "window"]),
        page_size=st.sampled_from([1, 3]),
        pages=st.integers(12, 40),
        rows=st.integers(2, 6),
        window=st.sampled_from([2, 5, 12]),
        long_row=st.sampled_from([2, 8]),
        host=st.sampled_from([12, 40]),
    )
    def build(self, **options: Any) -> None:
        super().build(**options)

    @rule()
    def push_out(self) -> None:
        """Take all the room of each pool, for a moment, and write into it."""
        cache = self.memory.kv_cache
        for pool, counts in enumerate(cache.audit.page_counts()):
            room = counts.free + counts.cached_evictable - counts.promised
            if room > 0:
                share = (("all the room", room),)
                pages = cache.allocator.allocate(pool, share)
                self.memory.contents[pool][pages] = NOBODYS
                cache.allocator.free(pool, share, pages)

    @precondition(lambda self: known(self.memory.host.tier).loads._running)
    @rule()
    def give_up(self) -> None:
        """The request behind the oldest load waits no longer."""
        tier = known(self.memory.host.tier)
        load = next(iter(tier.loads._running.values()))
        if not load.given_up:
            tier.loads.give_up(load)

    @precondition(lambda self: known(self.memory.host.tier).loads._running)
    @rule()
    def push_out_of_the_host(self) -> None:
        """Evict all parts that nobody reads, while some are read, and write into their room."""
        for pool, window in known(self.memory.host.tier).pages.windows.items():
            window._evict(window.total)
            self.memory.host.contents[pool][list(window._slots.free_slots)] = NOBODYS


@FAULTS.add
def window_part_found_without_the_pages_behind_it(patch: pytest.MonkeyPatch) -> None:
    """The last page's part is taken for the whole window."""

    def narrow(original: Any, window: HostWindow, *args: Any) -> None:
        original(window, *args)
        window.behind = 1

    wrap(patch, HostWindow, "__init__", narrow)


@FAULTS.add
def window_begun_and_not_ended_is_published(patch: pytest.MonkeyPatch) -> None:
    """What has come of a load that was given up is published as if its window had come."""
    patch.setattr(Lease, "can_go_back", lambda lease, prefix_len: True)
    patch.setattr(RadixWindows, "can_end", lambda *args: True)


@FAULTS.add
def load_that_does_not_slide(patch: pytest.MonkeyPatch) -> None:
    """It holds pages of the window that no copy writes, and publishes them."""

    def stay(original: Any, cache: KVCacheManager, lease: Lease, position: int) -> None:
        if not lease.holder.startswith("load "):
            original(cache, lease, position)

    wrap(patch, KVCacheManager, "slide", stay)


@FAULTS.add
def part_of_a_page_that_was_used_again(patch: pytest.MonkeyPatch) -> None:
    def all_valid(
        original: Any, pages: HostPages, pool: int, parts: Sequence[HostPart], valid: Any
    ) -> None:
        original(pages, pool, parts, [True] * len(parts))

    wrap(patch, HostPages, "end_window_write", all_valid)


@FAULTS.add
def part_evicted_while_a_copy_reads_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostWindow, "pin", lambda window, parts: None)
    patch.setattr(HostWindow, "unpin", lambda window, parts: None)


@FAULTS.add
def part_not_freed_with_its_page(patch: pytest.MonkeyPatch) -> None:
    def leave(original: Any, pages: HostPages, page: HostPage) -> None:
        page.parts = {}
        original(pages, page)

    wrap(patch, HostPages, "_take_out", leave)


@few(2)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_of_windows_on_the_host_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    find(FAULTS[name], monkeypatch, WindowMachine)


@pytest.mark.parametrize("walks", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_without_a_fault_nothing_is_found(walks: int):
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(
        WindowMachine, settings=settings(BELOW_THE_DEVICE, max_examples=walks)
    )
