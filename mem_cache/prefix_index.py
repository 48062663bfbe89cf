"""The seam of the prefix index: who finds pages that an earlier request computed.

An index never frees a request's memory: `insert` tells which pages it took,
`evict` names pages that it lets go, and the ledger moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """Pages of a cached prefix, kept from eviction until `PrefixIndex.unlock`."""

    pages: tuple[int, ...] = ()


class PrefixIndex(Protocol):
    """Whole pages of settled KV, found again by their token ids."""

    def match(self, token_ids: Sequence[int]) -> PrefixLock:
        """Lock the longest cached prefix of `token_ids`, in whole pages.

        Callers leave out the last token of a prompt: one must be computed, to be sampled from.
        """
        ...

    def unlock(self, lock: PrefixLock) -> None:
        """End one lock."""
        ...

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> Sequence[int]:
        """Take over the whole `pages` of `token_ids`.

        Returns those it did not take, because it has the same tokens already:
        they stay the caller's.
        """
        ...

    def evict(self, num_pages: int) -> Sequence[int]:
        """Let go of `num_pages` unlocked pages, or of all there are; least recently used first."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could let go of now."""
        ...


class NoPrefixIndex:
    """No reuse: nothing is kept, nothing is found."""

    def match(self, token_ids: Sequence[int]) -> PrefixLock:
        """Find nothing."""
        return PrefixLock()

    def unlock(self, lock: PrefixLock) -> None:
        """Nothing was locked."""

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> Sequence[int]:
        """Take nothing: all of `pages` stay the caller's."""
        return pages

    def evict(self, num_pages: int) -> Sequence[int]:
        """There is nothing to let go of."""
        return ()

    @property
    def evictable_pages(self) -> int:
        """None."""
        return 0
