"""The host tier below a `Memory`: copies move their bytes one half after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvrelay.mem_cache.host.host_page import HostPage, HostPageState
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.tier_copies import CopyEnded, PageMoves
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from tests.known import known
from tests.mem_cache.truth import truth_of

if TYPE_CHECKING:
    from tests.mem_cache.memory import Memory

NAMESPACES = ("", "other")


@dataclass(eq=False)
class Copy:
    """Between the device and the host."""

    moves: PageMoves
    halves: int = 0
    """Of its pages, that have been copied."""


class HostModel:
    """A `CopyStream` with the host's contents; peers read from these, too.

    Args:
        total: pages; 0: no host.
    """

    def __init__(self, memory: Memory, total: int, log: PrefixLog) -> None:
        self._memory = memory
        self.tier: HostTier | None = None
        self.copies: list[Copy] = []
        self.forgotten: list[HostPage] = []
        self.lent: list[tuple[list[HostPage], list[list[np.ndarray]]]] = []
        """Pages that a peer reads, and what they hold in each pool, all the time."""
        if total:
            pools = memory.kv_cache.shape.pools
            # Of windows the host has less room than of pages, so that parts are evicted alone.
            totals = [total if pool.window is None else -(-total // 2) for pool in pools]
            self.contents = [np.zeros((total, memory.page_size), np.int64) for total in totals]
            page_bytes = [(2 << 20) // len(pools)] * len(pools)
            speed = TierSpeed(1.0)
            self.tier = HostTier(memory.kv_cache, log, totals, page_bytes, self, speed)

    def start(self, moves: PageMoves) -> None:
        """The `CopyStream`'s part: bytes move when `copy` is called, one half after the other."""
        self.copies.append(Copy(moves))

    def bring_back(self, tokens: list[int], namespace: str) -> bool:
        """Begin a load of what the host has of these tokens; False: nothing, or no room."""
        ids = np.asarray(tokens, np.int32)
        found = known(self.tier).loads.find(ids, namespace, known(self.tier).hash(ids, namespace))
        return found is not None and known(self.tier).loads.load(found, None) is not None

    def lend(self, tokens: list[int], namespace: str, first: int) -> bool:
        """A peer begins to read what the host has of these tokens from a page on, if anything."""
        tier, ids = known(self.tier), np.asarray(tokens, np.int32)
        pages = tier.lend(ids, tier.hash(ids, namespace), first)
        truths, size = [], self._memory.page_size
        for page in pages:
            end = (page.place + 1) * size
            pools = range(len(self.contents))
            truths.append([truth_of(namespace, n, tokens[:end])[-size:] for n in pools])
        if pages:
            self.lent.append((pages, truths))
        return bool(pages)

    def forget_lent(self, number: int) -> None:
        """Nobody finds any more what a peer reads, nor what continues it."""
        pages, _ = self.lent[number % len(self.lent)]
        if pages[0].state is HostPageState.CACHED:
            self.forgotten += pages[0].subtree()
            known(self.tier).forget(pages[0].key)

    def end_lending(self, number: int) -> None:
        """The stream of a peer that reads the host ends."""
        pages, _ = self.lent.pop(number % len(self.lent))
        known(self.tier).take_back(pages)

    def prefetch(self, tokens: list[int], namespace: str) -> None:
        """Begin to bring what storage has of these tokens to the host."""
        tier, ids = known(self.tier), np.asarray(tokens, np.int32)
        keys, each = tier.split(ids, tier.hash(ids, namespace))
        if keys:
            known(tier.storage).prefetch(keys, each, lambda *_: True)

    def copy(self) -> None:
        """The next half of the oldest copy that has not moved all of its bytes."""
        copy = next((one for one in self.copies if one.halves < 2), None)
        if copy is None:
            return
        moves = copy.moves
        for pool, (here, there) in enumerate(
            zip(moves.device_pages, moves.host_pages, strict=True)
        ):
            middle = len(here) // 2
            part = slice(middle, None) if copy.halves else slice(0, middle)
            device, host = self._memory.contents[pool], self.contents[pool]
            if moves.to_host:
                host[there[part]] = device[here[part]]
            else:
                device[here[part]] = host[there[part]]
        copy.halves += 1

    def finish_copy(self) -> None:
        """Tell the engine that the oldest copy has ended; all of its bytes have moved."""
        while self.copies[0].halves < 2:
            self.copy()
        known(self.tier).finish(CopyEnded(self.copies.pop(0).moves.operation, 0.0))

    def prefix_of(self, page: HostPage) -> tuple[str, list[int]]:
        """The namespace of a host page, and all tokens up to its end."""
        path = list(page.path())[::-1]
        tokens = np.frombuffer(b"".join(one.tokens for one in path), "<i4").tolist()
        hashes, first = self._memory.hashes, path[0]
        namespace = next(
            name for name in NAMESPACES
            if hashes.extend(hashes.root(name), first.tokens) == first.key
        )  # fmt: skip
        return namespace, tokens

    def check(self) -> None:
        """Conservation there; and what can be found is what was written for its tokens."""
        tier = known(self.tier)
        tier.pages.check_pages()
        device = self._memory.kv_cache.audit.page_counts()
        assert all(counts.accounted == counts.total for counts in tier.pool_counts(device))
        self._memory.check_index()
        for lent, truths in self.lent:
            for page, of_pools in zip(lent, truths, strict=True):
                for pool, expected in enumerate(of_pools):
                    if pool not in tier.pages.windows:
                        held = self.contents[pool][page.slot]
                        assert (held == expected).all(), "what a peer reads was reused"
        found = list(tier.pages)
        assert not set(found) & set(self.forgotten), "what was forgotten is found again"
        for page in found:
            namespace, tokens = self.prefix_of(page)
            for pool, contents in enumerate(self.contents):
                window = tier.pages.windows.get(pool)
                held = page if window is None else window.part(page)
                if held is not None:
                    truth = truth_of(namespace, pool, tokens)[-self._memory.page_size :]
                    assert (contents[held.slot] == truth).all(), f"host page {page.slot} is wrong"
