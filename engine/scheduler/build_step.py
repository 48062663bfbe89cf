"""The step made of what a scheduler has chosen: page tables are copied, lengths committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from kvrelay.engine.executor.step import Scheduled, Step
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Batch
from kvrelay.mem_cache.leases.publishing import PageCopy

RequestT = TypeVar("RequestT", bound=Request)


def build_step(
    number: int,
    scheduled: Sequence[Scheduled[RequestT]],
    copies: Sequence[PageCopy],
    kv_cache: KVCacheManager,
) -> Step[RequestT]:
    """Copy the page tables for a step, and commit the tokens that it will surely write.

    Args:
        number: the step's, from the clock of steps; its fences pass when it has ended.
        scheduled: what the step computes; may be empty if there are copies.
        copies: page copies that the step makes first.
        kv_cache: manages the requests' leases.
    """
    if not scheduled:
        return Step(number, scheduled, (), copies)
    batch = Batch(item.request.held for item in scheduled)
    for item in scheduled:
        item.request.last_step = number
    counts = np.array([item.num_tokens for item in scheduled])
    kv_cache.lengths.commit(batch, kv_cache.lengths.committed(batch) + counts)
    return Step(number, scheduled, kv_cache.lengths.page_tables(batch), copies)
