"""The interface of a prefix index, which finds pages that an earlier request computed.

An index never frees a request's memory. `insert` returns the pages that it has taken, `evict` those
that it has let go of, and `PageAllocator` moves them. Pages come as one array a pool, in the order
of the pools, with one entry for each page of the tokens. `NO_PAGE` stands where a window pool has
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.account import Pages

TokenIds = npt.NDArray[np.int32]
"""Token ids, ``[n]``; the part beyond whole pages is cut off."""


@dataclass(frozen=True, slots=True)
class PrefixLock:
    """Pages of a cached prefix, kept from eviction until `PrefixIndex.unlock`."""

    pages: tuple[Pages, ...]
    """The pages of each pool; `NO_PAGE` where the window has passed: those pages are not locked."""
    entry: object = None
    """The index's own record of the lock."""

    @property
    def num_pages(self) -> int:
        """The number of pages matched, whether or not a window pool still has them."""
        return len(self.pages[0])


@dataclass(frozen=True, slots=True)
class Inserted:
    """The result of offering pages to an index."""

    lock: PrefixLock
    """The lock on the pages that the index now has for the offered tokens."""
    taken: tuple[Pages, ...]
    """The offered pages that the index has taken."""


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """The changes since they were last taken, as marks (see `wire/page_hash.py`)."""

    stored: tuple[int, ...] = ()
    """The marks of prefixes that are found now."""
    removed: tuple[int, ...] = ()
    """The marks of prefixes that are no longer found."""
    overflown: bool = False
    """Whether there were too many changes: the whole index must be reported anew."""


class PrefixIndex(Protocol):
    """An interface to whole pages of written KV, found again by their token ids.

    `namespace` keeps tenants apart: none finds pages that another has published.
    """

    keeps: bool
    """Whether published pages are found by other requests."""

    def match(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Lock the longest cached prefix of `token_ids` that can be continued from.

        Callers leave out the last token of a prompt if one must be computed, to be sampled from.
        """
        ...

    def hold(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Lock all known pages of `token_ids`, whether or not they can be continued from.

        The caller must end the lock before it lets anything be evicted.
        """
        ...

    def lock_again(self, lock: PrefixLock) -> None:
        """Lock the same pages once more; they then need one more `unlock`."""
        ...

    def unlock(self, lock: PrefixLock) -> tuple[Pages, ...]:
        """End one lock. Returns the pages that the index lets go of."""
        ...

    def unlock_pool(self, lock: PrefixLock, pool: int) -> tuple[PrefixLock, tuple[Pages, ...]]:
        """End a lock in a window pool alone, because its window has passed.

        Returns:
            The rest of the lock, to be ended like any other, and the pages that the index lets go
            of.
        """
        ...

    def insert(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """Take over `pages` of `token_ids`, and lock the prefix.

        If it has the same tokens already, it keeps its own pages, and the caller keeps the offered
        ones.
        """
        ...

    def share(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """Insert pages that others will `lock_again`. Even an index that keeps nothing takes them.

        Such an index keeps them until the last lock on them ends.
        """
        ...

    def finds(self, lock: PrefixLock) -> bool:
        """Whether the pages that `lock` locks can still be found, as they were not forgotten."""
        ...

    def forget(self, token_ids: TokenIds, start: int, namespace: str = "") -> None:
        """Make `token_ids` from token `start` on, and their continuations, unfindable.

        The pages stay until they are unlocked and evicted.
        """
        ...

    def evict(self, pool: int, num_pages: int) -> tuple[Pages, ...]:
        """Let go of unlocked pages, least recently used first, of all pools of each node.

        Lets go of at least `num_pages` of pool number `pool`, or all that there are.
        """
        ...

    def retain(self, token_ids: TokenIds, seconds: float, namespace: str = "") -> None:
        """Evict what is known of `token_ids` after all that is not retained, for so many seconds.

        That holds within the bounds of its tenant; see `Retention`.
        """
        ...

    def retained_tokens(self) -> int:
        """Count the tokens that are retained now, of all tenants."""
        ...

    def evictable(self, pool: int) -> int:
        """Count the pages of a pool that `evict` could let go of now. O(1)."""
        ...

    def size(self, pool: int) -> int:
        """Count the pages of a pool that are in the index. O(1)."""
        ...

    def take_changes(self) -> PrefixChanges | None:
        """Take the changes since the last call; None: there are none, or they are not recorded."""
        ...

    def marks(self) -> tuple[int, ...] | None:
        """List the marks of all that is found; None: they are not recorded."""
        ...

    def audit(self) -> tuple[Pages, ...]:
        """List every page in the index, after a check of its own accounts.

        Raises:
            ConservationError: a count or a lock is wrong.
        """
        ...
