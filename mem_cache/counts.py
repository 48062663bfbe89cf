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


@dataclass(slots=True)
class TierCounts:
    """What a tier below the device has done so far. Pages, bytes and seconds."""

    written_pages: int = 0
    """Copied there."""
    dropped_pages: int = 0
    """Not kept there: no room, or the device used the page again before the copy had ended."""
    loaded_pages: int = 0
    """Brought back."""
    lent_pages: int = 0
    """Let to decode workers, which may read them from there."""
    forgotten_pages: int = 0
    """Not found there any more, as a forward that failed may have computed them wrong."""
    evicted_pages: int = 0
    """Evicted there to make room."""
    broken_pages: int = 0
    """Truncated, foreign or corrupt there: removed."""
    write_bytes: int = 0
    write_seconds: float = 0.0
    """Of copies alone, without their wait."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    late_loads: int = 0
    """Not waited for to the end: computing takes no longer."""
    slow_loads: int = 0
    """Not begun: computing was expected to take no longer."""
