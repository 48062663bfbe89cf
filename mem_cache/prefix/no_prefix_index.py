"""The prefix index of a worker without one: it holds only pages that choices of a request share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.mem_cache.account import NO_PAGES, Pages
from kvrelay.mem_cache.prefix.prefix_index import Inserted, PrefixChanges, PrefixLock, TokenIds
from kvrelay.mem_cache.prefix.radix_tree import RadixTree


class NoPrefixIndex:
    """A `PrefixIndex` that finds nothing and keeps nothing.

    Only shared pages are in a tree, as long as they are locked.

    Args:
        page_size: tokens a page.
        windows: for each pool the tokens that its layers look back; None: all.
    """

    keeps = False

    def __init__(self, page_size: int, windows: Sequence[int | None]) -> None:
        self._shared = RadixTree(page_size, windows)
        self._nothing = PrefixLock((NO_PAGES,) * len(windows))

    def match(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Find nothing."""
        return self._nothing

    def hold(self, token_ids: TokenIds, namespace: str = "") -> PrefixLock:
        """Hold nothing: shared pages are locked by those who share them."""
        return self._nothing

    def lock_again(self, lock: PrefixLock) -> None:
        """See `PrefixIndex`."""
        if lock is not self._nothing:
            self._shared.lock_again(lock)

    def unlock(self, lock: PrefixLock) -> tuple[Pages, ...]:
        """Let go of pages that are no longer locked."""
        if lock is self._nothing:
            return self._nothing.pages
        return self._let_go(self._shared.unlock(lock))

    def unlock_pool(self, lock: PrefixLock, pool: int) -> tuple[PrefixLock, tuple[Pages, ...]]:
        """See `PrefixIndex`."""
        if lock is self._nothing:
            return lock, self._nothing.pages
        left, gone = self._shared.unlock_pool(lock, pool)
        return left, self._let_go(gone)

    def _let_go(self, gone: tuple[Pages, ...]) -> tuple[Pages, ...]:
        """Evict all unlocked pages. Returns them by pool, with those that are `gone` already."""
        pools = range(len(gone))
        evicted = [self._shared.evict(pool, self._shared.evictable(pool)) for pool in pools]
        return tuple(np.concatenate(pages) for pages in zip(gone, *evicted, strict=True))

    def insert(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """Take nothing: all of `pages` stay the caller's."""
        return Inserted(self._nothing, self._nothing.pages)

    def share(self, token_ids: TokenIds, pages: Sequence[Pages], namespace: str = "") -> Inserted:
        """See `PrefixIndex`."""
        return self._shared.insert(token_ids, pages, namespace)

    def finds(self, lock: PrefixLock) -> bool:
        """Return True: shared pages are never forgotten."""
        return True

    def forget(self, token_ids: TokenIds, start: int, namespace: str = "") -> None:
        """Do nothing: no pages are found."""

    def evict(self, pool: int, num_pages: int) -> tuple[Pages, ...]:
        """See `PrefixIndex`."""
        return self._shared.evict(pool, num_pages)

    def retain(self, token_ids: TokenIds, seconds: float, namespace: str = "") -> None:
        """Do nothing: no pages are kept."""

    def retained_tokens(self) -> int:
        """Return 0."""
        return 0

    def evictable(self, pool: int) -> int:
        """Count the shared pages that no window sees any more."""
        return self._shared.evictable(pool)

    def size(self, pool: int) -> int:
        """Count the shared pages."""
        return self._shared.size(pool)

    def take_changes(self) -> PrefixChanges | None:
        """Return None: no pages are found."""
        return None

    def marks(self) -> tuple[int, ...] | None:
        """Return None: no pages are found."""
        return None

    def audit(self) -> tuple[Pages, ...]:
        """List the shared pages."""
        return self._shared.audit()
