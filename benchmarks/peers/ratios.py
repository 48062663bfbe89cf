"""Ratios of two systems by round, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.peers.store import Figures


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, and the least and the largest of them."""

    median: float
    least: float
    largest: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None if there are no values."""
        found = list(values)
        if not found:
            return None
        return cls(statistics.median(found), min(found), max(found), len(found))


def spread(rounds: Mapping[int, Figures], figure: str) -> Spread | None:
    """The spread of one figure over the rounds that have it."""
    return Spread.of(known[figure] for known in rounds.values() if known.get(figure) is not None)


def ratio(ours: Mapping[int, Figures], theirs: Mapping[int, Figures], figure: str) -> Spread | None:
    """The spread of our figure over theirs, round by round; rounds of one side alone are left out.

    So each quotient is of two runs that were close in time.
    """
    pairs = ((ours[n].get(figure), theirs[n].get(figure)) for n in sorted(ours.keys() & theirs))
    return Spread.of(mine / other for mine, other in pairs if mine is not None and other)
