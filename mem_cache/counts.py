"""Counts of what the prefix index has done, and of the quarantine.

Those of pages and rows by state are `wire.load.PoolCounts`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounts:
    """What the prefix index has done so far."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    duplicate_pages: int = 0

    def copy(self) -> CacheCounts:
        """The counts of this moment. `dataclasses.replace` takes five times as long."""
        return CacheCounts(
            self.lookups, self.hits, self.hit_tokens, self.evicted_pages, self.duplicate_pages
        )


@dataclass(slots=True)
class QuarantineCounts:
    """What is in quarantine for one reason."""

    pages: int
    """Of all pools."""
    since: float
    """When the oldest came there."""
