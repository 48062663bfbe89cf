"""Watches how long memory is in quarantine, and lets the worker drain when it is too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrelay.engine.scheduler.metrics import QUARANTINE_DRAINS, WorkerMetrics

logger = logging.getLogger(__name__)

_LOOKS = 10
"""At the quarantine's age, in the time that it may have."""


async def drain_on_old_quarantine(
    metrics: WorkerMetrics,
    limit: float,
    run_a_pass: Callable[[], Awaitable[None]],
    drain: Callable[[], None],
) -> None:
    """Wait until memory was in quarantine for too long, then drain the worker and return.

    Fences that have not passed for so long will not pass, so the memory is lost until
    the worker is restarted.

    Args:
        metrics: knows the age of the quarantine, as of the engine's latest pass.
        limit: seconds that memory may be in quarantine.
        run_a_pass: returns after the engine has run a whole pass, or a part of one.
        drain: begins to drain the worker.
    """
    while True:
        await asyncio.sleep(limit / _LOOKS)
        if metrics.quarantine_age > limit:
            # The second time a whole pass has run, which finds fences that have passed meanwhile.
            await run_a_pass()
            await run_a_pass()
        if metrics.quarantine_age > limit:
            logger.error(
                "memory is in quarantine for over %g s (--quarantine-limit): the worker drains",
                limit,
            )
            metrics.count(QUARANTINE_DRAINS)
            drain()
            return
