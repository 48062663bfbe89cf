"""The counts of events in the prefix index and in tiers, and of the quarantine.

Counts of pages and rows by state are `wire.load.PoolCounts`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounts:
    """The events of the prefix index so far."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    duplicate_pages: int = 0

    def copy(self) -> CacheCounts:
        """Copy the counts. `dataclasses.replace` takes five times as long."""
        return CacheCounts(
            self.lookups, self.hits, self.hit_tokens, self.evicted_pages, self.duplicate_pages
        )


@dataclass(slots=True)
class QuarantineCounts:
    """The pages in quarantine for one reason."""

    pages: int
    """The number of pages, of all pools."""
    since: float
    """The moment when the oldest page came there."""


@dataclass(slots=True)
class TierCounts:
    """The events of a tier below the device so far, in pages, bytes and seconds."""

    written_pages: int = 0
    """Pages copied there."""
    dropped_pages: int = 0
    """Pages not kept there: no room, or the device used the page again before the copy had
    ended."""
    loaded_pages: int = 0
    """Pages brought back."""
    lent_pages: int = 0
    """Pages lent to decode workers, which may read them from there."""
    forgotten_pages: int = 0
    """Pages made unfindable, because a failed forward may have computed them wrong."""
    evicted_pages: int = 0
    """Pages evicted there to make room."""
    broken_pages: int = 0
    """Pages removed there because they were truncated, foreign or corrupt."""
    write_bytes: int = 0
    write_seconds: float = 0.0
    """The seconds of copies alone, without their wait."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    late_loads: int = 0
    """The number of loads that were not awaited to the end, because computing took no longer."""
    slow_loads: int = 0
    """The number of loads that were not begun, because computing was expected to take no longer."""
