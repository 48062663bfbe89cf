"""The highest rate of arrivals at which enough requests meet their limits."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable

from benchmarks.peers.store import Figures
from kvrelay.deploy.load_generator.load_report import Slo

ATTAINED_SHARE = 0.9
"""Of the requests sent: those that failed did not meet their limits."""
LOWEST_RATE = 0.05
"""Requests a second; what does not attain even this has no goodput."""
HIGHEST_RATE = 1000.0
"""All requests of a probe come at once then."""
_DIGITS = 4

Attains = Callable[[float], Awaitable[bool]]


def limits(idle: Iterable[Figures], factor: float) -> Slo:
    """So many times the better engine's medians, by the idle figures of the engines."""
    engines = list(idle)
    return Slo(
        ttft_ms=factor * min(figures["ttft_p50_ms"] for figures in engines),
        itl_ms=factor * min(figures["itl_p50_ms"] for figures in engines),
    )


async def highest_rate(attains: Attains, first: float, precision: float) -> float:
    """The highest rate found that attains; one that is ``1 + precision`` times as high does not.

    Doubles or halves ``first`` until there is a rate on either side, then takes their
    geometric mean. The same answers give the same rates, so that a search which was
    cut off finds its earlier probes again. 0 if even ``LOWEST_RATE`` is too high.
    """
    low, high = 0.0, math.inf
    rate = first
    while high > low * (1 + precision):
        rate = round(rate, _DIGITS)
        if await attains(rate):
            low = rate
        else:
            high = rate
        if high <= LOWEST_RATE:
            return 0.0
        if low >= HIGHEST_RATE:
            return low
        rate = _between(low, high)
    return low


def _between(low: float, high: float) -> float:
    if math.isinf(high):
        return low * 2
    return high / 2 if not low else math.sqrt(low * high)
