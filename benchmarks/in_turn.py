"""The time of works that are measured in turn, so that a neighbour's load hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def least_milliseconds(works: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the least CPU milliseconds of each."""
    least = dict.fromkeys(works, float("inf"))
    for turn in range(turns + 1):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            if turn:  # what compiles, or allocates, does so at first
                least[name] = min(least[name], (time.thread_time() - begun) * 1e3)
    return least
