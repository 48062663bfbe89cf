"""How much a process computes that has nothing to do."""

from __future__ import annotations

import asyncio
import time

_LOOKS = 3


async def least_cpu_seconds(seconds: float, limit: float) -> float:
    """CPU time of this process in the quietest of a few looks, of so many seconds each.

    What polls is dear at every look; a neighbour on the machine, or what an earlier test has left,
    makes one dear. The first look that stays below `limit` is the last.
    """
    least = float("inf")
    for _ in range(_LOOKS):
        before = time.process_time()
        await asyncio.sleep(seconds)
        least = min(least, time.process_time() - before)
        if least < limit:
            break
    return least
