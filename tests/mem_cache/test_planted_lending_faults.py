"""Pages of the host that peers read: held until the stream ends, and faults in that are found."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvrelay.mem_cache.host.host_page import HostPage
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.host_tier import HostTier
from tests.known import known
from tests.mem_cache.planting import BELOW_THE_DEVICE, Faults, find, wrap
from tests.mem_cache.test_planted_host_faults import HostMachine
from tests.pairwise import few

FAULTS = Faults()


class LendingMachine(HostMachine):
    """With decode workers that read the host's pages."""

    @precondition(lambda self: any(known(self.memory.host.tier).pages))
    @rule(pick=st.integers(0, 39), first=st.sampled_from([0, 0, 1]))
    def lend(self, pick: int, first: int) -> None:
        """What is there: of random prompts little is."""
        pages = list(known(self.memory.host.tier).pages)
        page = pages[pick % len(pages)]
        namespace, tokens = self.memory.host.prefix_of(page)
        lent = self.memory.host.lend(tokens, namespace, first)
        assert lent == (page.place >= first), "what is found is lent, from the page that is named"

    @precondition(lambda self: any(known(self.memory.host.tier).pages))
    @rule(pick=st.integers(0, 39), others=st.integers(1, 3))
    def lend_while_the_host_fills(self, pick: int, others: int) -> None:
        """What is lent is not what is evicted for others. Random steps seldom come so far."""
        self.lend(pick, 0)
        for other in range(others):
            self.there_and_back(pick + other)

    @precondition(lambda self: self.memory.host.lent)
    @rule(pick=st.integers(0, 39))
    def end_lending(self, pick: int) -> None:
        self.memory.host.end_lending(pick)

    @precondition(lambda self: self.memory.host.lent)
    @rule(pick=st.integers(0, 39))
    def forget_lent(self, pick: int) -> None:
        self.memory.host.forget_lent(pick)


@FAULTS.add
def reused_while_a_peer_reads(patch: pytest.MonkeyPatch) -> None:
    """What is lent is held while it is announced, not until the stream ends."""

    def let_go(original: Any, tier: HostTier, *args: Any) -> Any:
        pages = original(tier, *args)
        tier.pages.unpin(pages)
        return pages

    wrap(patch, HostTier, "lend", let_go)
    patch.setattr(HostTier, "take_back", lambda tier, pages: None)


@FAULTS.add
def free_what_a_peer_reads(patch: pytest.MonkeyPatch) -> None:
    """What is forgotten is free at once, though a stream is open whose peer reads it."""

    def at_once(original: Any, pages: HostPages, top: HostPage) -> int:
        removed = original(pages, top)
        read = [page for page in top.subtree() if page in pages._slots.gone and page.pins]
        pages._slots.end_gone(read)
        return int(removed)

    wrap(patch, HostPages, "_remove_subtree", at_once)


@FAULTS.add
def never_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "take_back", lambda tier, pages: None)


@few(2)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_of_lending_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, LendingMachine)


@pytest.mark.parametrize("walks", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_without_a_fault_nothing_is_found(walks: int):
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(
        LendingMachine, settings=settings(BELOW_THE_DEVICE, max_examples=walks)
    )
