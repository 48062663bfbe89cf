"""What is told of the memory's account: the shape of a pool, and counts at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the ledger knows of a pool."""

    name: str
    total_pages: int
    window: int | None = None
    """Tokens that its layers look back, see `KVGeometry.window`."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's account at one moment; the states sum to `total`.

    `promised` pages are still among the free, or evictable: running requests
    may grow into them, so nobody else is admitted on their account.
    """

    pool: str
    page_size: int
    total: int
    free: int
    held: int
    cached_evictable: int
    cached_protected: int
    session: int
    quarantined: int
    promised: int

    @property
    def accounted(self) -> int:
        """The sum of all states."""
        return (
            self.free
            + self.held
            + self.cached_evictable
            + self.cached_protected
            + self.session
            + self.quarantined
        )


@dataclass(slots=True)
class CacheCounts:
    """What the prefix index has done so far."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    duplicate_pages: int = 0


def window_pages(window: int, page_size: int, ahead: int) -> int:
    """Pages of a window pool that a lease ever has at the same time.

    From the page of the first token that the next one sees, were it the first
    of its page, to the page of the last of `ahead` tokens from the next one on.
    """
    behind = -(-(window - 1) // page_size)
    return behind + (page_size + ahead - 2) // page_size + 1
