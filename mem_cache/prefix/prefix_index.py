"""What a prefix index does: it finds pages that an earlier request computed.

An index never frees a request's memory: `insert` returns the pages that it has
taken, `evict` those that it has let go of, and `PageAllocator` moves them.
Pages come as one array a pool, in the order of the pools, with one entry for
each page of the tokens; `NO_PAGE` stands where a window pool has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Pages

TokenIds = npt.NDArray[np.int32]
"""``[n]``; what is longer than whole pages is cut off."""

NO_PAGE = -1


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """Pages of a cached prefix, kept from eviction until `PrefixIndex.unlock`."""

    pages: tuple[Pages, ...]
    """A pool's entry is `NO_PAGE` where the window has passed: those pages are not locked."""
    entry: object = None
    """The index's own."""

    @property
    def num_pages(self) -> int:
        """Pages that were matched, whether or not a window pool still has them."""
        return len(self.pages[0])


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of pages that were offered to an index."""

    lock: PrefixLock
    """On what the index has now of the offered tokens."""
    taken: tuple[Pages, ...]
    """Those of the offered pages that are the index's from now on."""


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What has changed since the changes were last taken, as marks (see `wire/page_hash.py`)."""

    stored: tuple[int, ...] = ()
    """Of prefixes that are found now."""
    removed: tuple[int, ...] = ()
    """Of prefixes that are found no more."""
    overflown: bool = False
    """There were too many: what is found must be asked for as a whole."""


class PrefixIndex(Protocol):
    """Whole pages of written KV, found again by their token ids.

    `namespace` keeps tenants apart: what one has published, no other finds.
    """

    keeps: bool
    """Whether what is published is found by others."""

    def match(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Lock the longest cached prefix of `token_ids` that can be continued from.

        Callers leave out the last token of a prompt if one must be computed, to be sampled from.
        """
        ...

    def hold(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Lock all that is known of `token_ids`, whether or not it can be continued from.

        The caller ends the lock before it lets anything be evicted.
        """
        ...

    def lock_again(self, lock: PrefixLock) -> None:
        """Lock once more what `lock` locks: it is then ended by one `unlock` more."""
        ...

    def unlock(self, lock: PrefixLock) -> tuple[Pages, ...]:
        """End one lock; returns the pages that the index lets go of for that."""
        ...

    def unlock_pool(self, lock: PrefixLock, pool: int) -> tuple[PrefixLock, tuple[Pages, ...]]:
        """End a lock in a window pool alone, because its window has passed.

        Returns:
            the lock that is left, to be ended as any, and the pages that the index lets go of.
        """
        ...

    def insert(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """Take over `pages` of `token_ids`, and lock the prefix.

        Where it has the same tokens already it keeps the pages that it has, and
        the caller's stay the caller's.
        """
        ...

    def share(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """`insert` for others who will `lock_again`: even an index that keeps nothing takes them.

        Until the last lock on them ends.
        """
        ...

    def finds(self, lock: PrefixLock) -> bool:
        """Whether what `lock` locks can still be found: it was not forgotten."""
        ...

    def forget(self, token_ids: TokenIds, start: int, namespace: str = "") -> None:
        """Find nothing of `token_ids` from token `start` on any more, nor what continues them.

        The pages stay until nobody locks them and they are evicted.
        """
        ...

    def evict(self, pool: int, num_pages: int) -> tuple[Pages, ...]:
        """Let go of unlocked pages, least recently used first, of every pool as it goes.

        At least `num_pages` of pool number `pool`, or all that there are.
        """
        ...

    def evictable(self, pool: int) -> int:
        """Pages of a pool that `evict` could let go of now. O(1)."""
        ...

    def size(self, pool: int) -> int:
        """Pages of a pool that are in the index. O(1)."""
        ...

    def take_changes(self) -> PrefixChanges | None:
        """What is found now, or no more, since the last call; None: nothing, or nobody asks."""
        ...

    def marks(self) -> tuple[int, ...] | None:
        """The marks of all that is found; None: it is not told."""
        ...

    def audit(self) -> tuple[Pages, ...]:
        """Every page that is in the index, after a check of its own accounts.

        Raises:
            ConservationError: a count or a lock is wrong.
        """
        ...
