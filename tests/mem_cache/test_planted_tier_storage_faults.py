"""The model-based test finds faults of the tier of storage: so it would find one like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvrelay.mem_cache.host.host_page import HostPage, HostPageState
from kvrelay.mem_cache.host.host_pages import HostPages
from kvrelay.mem_cache.host.storage_tier import Prefetch, StorageTier
from kvrelay.mem_cache.storage.storage_orders import StorageEnded
from kvrelay.mem_cache.storage.storage_pages import StoreState
from kvrelay.wire.page_hash import PageHashes
from tests.known import known
from tests.mem_cache.memory import Holder
from tests.mem_cache.planting import BELOW_THE_DEVICE, Faults, find, in_little_memory, wrap
from tests.mem_cache.test_planted_host_faults import NOBODYS, HostMachine

FAULTS = Faults()


class StorageMachine(HostMachine):
    """With storage in any case, below a host that is short of pages."""

    @in_little_memory(12, 24, storage=True)
    def build(self, **options: Any) -> None:
        super().build(**options)

    @rule()
    def store_all(self) -> None:
        """Write to storage what waits for that, and do all else that it was told to."""
        store = self.memory.store
        known(self.memory.host.tier).write_back()
        while store.orders:
            while store.orders:
                store.advance()
            known(self.memory.host.tier).write_back()

    @precondition(lambda self: self.memory.store.pages)
    @rule(pick=st.integers(0, 39))
    def prefetch_what_is_there(self, pick: int) -> None:
        """From the page picked on, the first that the host lacks."""
        kept = list(self.memory.store.pages.values())
        for one in (*kept[pick % len(kept) :], *kept[: pick % len(kept)]):
            if known(self.memory.host.tier).pages.get(one.page.key) is None:
                namespace, tokens = one.prefix
                self.memory.host.prefetch(tokens, namespace)
                return

    @rule()
    def fill_the_host(self) -> None:
        """Take all the room there, for a moment, and write to it: what nothing reads is lost."""
        pages = known(self.memory.host.tier).pages
        keys = [b"%032d" % number for number in range(pages.total)]
        taken = pages.reserve(None, keys, keys, 0)
        for contents in self.memory.host.contents:
            contents[[page.slot for page in taken]] = NOBODYS
        pages.end_write(taken, 0)

    @precondition(lambda self: self.memory.holders)
    @rule(pick=st.integers(0, 39), evicted=st.booleans())
    def stored_and_forgotten(self, pick: int, evicted: bool) -> None:
        """What a request has published goes to storage; it is forgotten, and asked for again.

        Random steps seldom come so far.
        """
        holder = self.to_storage(pick)
        if evicted:
            self.fill_the_host()
        self.memory.forget(holder)
        self.memory.host.prefetch(holder.tokens, holder.namespace)

    def to_storage(self, pick: int) -> Holder:
        """Compute, publish and store a request's tokens."""
        self.run_through(pick, publish=True)
        holder = self.pick(pick)
        self.write_all()
        self.memory.host.prefetch(holder.tokens, holder.namespace)
        self.store_all()
        return holder

    @precondition(lambda self: self.memory.holders)
    @rule(pick=st.integers(0, 39))
    def forgotten_on_its_way(self, pick: int) -> None:
        """What is in storage, and not on the host, is forgotten while it comes back."""
        holder = self.to_storage(pick)
        self.fill_the_host()
        self.memory.host.prefetch(holder.tokens, holder.namespace)
        for _ in range(2):
            self.memory.store.advance()
        self.memory.forget(holder)

    @precondition(lambda self: self.memory.holders)
    @rule(pick=st.integers(0, 39))
    def evicted_on_its_way(self, pick: int) -> None:
        """The host needs all of its room while it is half read for storage."""
        self.run_through(pick, publish=True)
        holder = self.pick(pick)
        self.write_all()
        self.memory.host.prefetch(holder.tokens, holder.namespace)
        for _ in range(3):
            self.memory.store.advance()
            known(self.memory.host.tier).write_back()
        self.fill_the_host()
        self.store_all()


@FAULTS.add
def page_visible_before_its_bytes_are(patch: pytest.MonkeyPatch) -> None:
    """The host finds what storage was only asked for."""

    def at_once(original: Any, tier: StorageTier, prefetch: Prefetch) -> Any:
        began = original(tier, prefetch)
        if began:
            number = max(tier._fetches)
            keys = [page.key for page in tier._fetches[number].pages]
            tier.finish(StorageEnded(number, keys, 0.0, StoreState(None)))
        return began

    wrap(patch, StorageTier, "_fetch", at_once)


@FAULTS.add
def hash_without_salt(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, PageHashes, "root", lambda original, hashes, namespace: original(hashes, ""))


@FAULTS.add
def completion_of_a_cleared_operation_that_recreates_it(patch: pytest.MonkeyPatch) -> None:
    def recreate(
        original: Any, pages: HostPages, written: Sequence[HostPage], num_valid: int
    ) -> None:
        for page in written[:num_valid]:
            parent = page.parent
            is_free = page.key not in pages._pages
            is_held = parent is None or pages._pages.get(parent.key) is parent
            if page.state is HostPageState.GONE and page.stored and is_free and is_held:
                page.state = HostPageState.WRITING
                pages._slots.gone.discard(page)
                pages._pages[page.key] = page
        original(pages, written, num_valid)

    wrap(patch, HostPages, "end_write", recreate)


@FAULTS.add
def freed_before_storage_has_read_it(patch: pytest.MonkeyPatch) -> None:
    """A page of the host may be evicted while it is written to storage."""
    patch.setattr(HostPages, "pin", lambda pages, some: None)
    patch.setattr(HostPages, "unpin", lambda pages, some: None)


@FAULTS.add
def not_forgotten_in_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StorageTier, "forget", lambda tier, keys: None)


@FAULTS.add
def forgotten_only_what_the_host_has(patch: pytest.MonkeyPatch) -> None:
    """Storage may have the page that the host lacks, and what continues it."""
    wrap(patch, StorageTier, "forget", lambda original, tier, keys: original(tier, keys[1:]))


SLOW = {"forgotten_only_what_the_host_has"}
"""Faults whose search takes long."""


@pytest.mark.parametrize(
    "name",
    [*sorted(FAULTS.keys() - SLOW), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_a_planted_fault_of_storage_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    find(FAULTS[name], monkeypatch, StorageMachine)


@pytest.mark.parametrize("walks", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_without_a_fault_nothing_is_found(walks: int):
    """Or else the tests above would show nothing."""
    run_state_machine_as_test(
        StorageMachine, settings=settings(BELOW_THE_DEVICE, max_examples=walks)
    )


def machine() -> StorageMachine:
    """With a request whose tokens are in storage alone."""
    state = StorageMachine()
    state.build(
        kind="full", page_size=3, pages=40, rows=4, window=1, long_row=8, host=24, storage=True
    )
    state.open(base=0, shared=1, length=1, output=0, namespace="", whole=True)
    state.to_storage(0)
    state.fill_the_host()
    return state


def forget_on_its_way(num_steps: int) -> None:
    """Forget what was ordered from storage, after so many steps of it."""
    state = machine()
    memory, holder = state.memory, state.pick(0)
    memory.host.prefetch(holder.tokens, holder.namespace)
    memory.store.advance()
    assert known(known(memory.host.tier).storage)._fetches, "nothing was ordered"
    for _ in range(num_steps):
        memory.store.advance()
    memory.forget(holder)
    while memory.store.orders:
        memory.store.advance()
        state.holds()
    assert not list(known(memory.host.tier).pages)
    assert not memory.store.pages
    state.teardown()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_is_forgotten_on_its_way_is_not_found(num_steps: int):
    """Before its order has begun, too: it comes, and nobody finds it."""
    forget_on_its_way(num_steps)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_is_found_though_it_was_forgotten_on_its_way_is_seen(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
):
    FAULTS["completion_of_a_cleared_operation_that_recreates_it"](monkeypatch)
    with pytest.raises(AssertionError, match="what was forgotten is"):
        forget_on_its_way(num_steps)
