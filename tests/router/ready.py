"""Ready workers and the placement among them, in pairs and aggregated."""

from __future__ import annotations

from typing import NoReturn

from kvrelay.router.placement.choose import PlacementRules, Placer
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ready_workers import ReadyWorkers


class Ready:
    """What can be put and dropped, and what is chosen."""

    def __init__(self, prefixes: KnownPrefixes | None = None) -> None:
        workers = ReadyWorkers(prefixes or KnownPrefixes(0), unasked)
        self.put, self.drop = workers.put, workers.drop
        self.choose = Placer(workers, PlacementRules()).choose


def unasked(incarnation: str) -> NoReturn:
    """Where decode workers compute no prompts, nobody's queue is looked at."""
    raise AssertionError(incarnation)
