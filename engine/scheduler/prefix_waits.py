"""The wait of a request while another one computes, or reads, the prefix that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import numpy as np

from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.metrics import PREFIX_WAITS
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.prefix.prefix_index import TokenIds

RequestT = TypeVar("RequestT", bound=Request)

_WORTH = 10
"""The part of its missing tokens that is worth a wait, as a divisor: a tenth or more must be
shared."""


@dataclass(frozen=True, slots=True)
class PrefixWait:
    """The wait of a request for a leader."""

    leader: Request
    """The request that computes, or reads, the shared prefix."""
    shared_len: int
    """Tokens of the shared whole pages; the wait ends when they are in the prefix index."""
    looked_at: int = -1
    """The `KVCacheManager.room_version` when the index was last found to lack some of them."""


class PrefixWaits(Generic[RequestT]):
    """The requests that wait for others, their leaders, and how long each waits.

    A leader goes on by itself: it has been granted memory, or waits for the answer. A waiting
    request holds nothing and leads nobody, so waits do not chain. It goes on as soon as the shared
    prefix is published, or when the leader has ended or makes no progress. Then it uses what the
    prefix index has.

    Args:
        context: the requests' memory.
        bound: seconds without progress of a leader after which nobody waits for it. 0: nobody waits
            at all.
        leads: whether a request is about to publish its input.
        at_end: whether a leader publishes all of its input at once when it is complete, and not
            chunk by chunk.
        leads_for: whether a leader (first argument) also leads a given request (second).
    """

    def __init__(
        self,
        context: SchedulerContext[RequestT],
        bound: float,
        leads: Callable[[RequestT], bool],
        *,
        at_end: Callable[[RequestT], bool],
        leads_for: Callable[[RequestT, RequestT], bool] = lambda leader, request: True,
    ) -> None:
        self._context = context
        self._bound = bound if context.kv_cache.index.keeps else 0.0
        self._leads = leads
        self._at_end = at_end
        self._leads_for = leads_for
        self._waits: dict[Request, PrefixWait] = {}
        context.on_release(lambda request: self._waits.pop(request, None))

    def wait_of(self, request: RequestT) -> PrefixWait | None:
        """The wait for the leader of a request; None: it waits for nobody."""
        return self._waits.get(request)

    def leaders(self, requests: Iterable[RequestT]) -> list[RequestT]:
        """Select the requests that others may wait for."""
        return [r for r in requests if self._may_lead(r)] if self._bound else []

    def _may_lead(self, request: RequestT) -> bool:
        """Whether others may wait for it. A turn on its session's pages publishes nothing."""
        return not request.borrowed_len and self._leads(request)

    def must_wait(self, request: RequestT, known_tokens: int, leaders: Iterable[RequestT]) -> bool:
        """Whether a request should hold nothing yet, because it will find more later.

        Args:
            request: has no memory.
            known_tokens: tokens of its input that may come from the prefix index.
            leaders: the requests that it may wait for.
        """
        if not self._bound or self._context.session_turns.has_kv_of(request):
            return False
        now = time.monotonic()
        before, token_ids = self._waits.get(request), request.input_ids[:known_tokens]
        if before is not None and self._goes_on(request, before, token_ids, now):
            return True
        found = self._find(request, token_ids, leaders, now)
        if found is None:
            self._waits.pop(request, None)
            return False
        self._waits[request] = found
        if before is None:
            self._context.metrics.count(PREFIX_WAITS)
        return True

    def _goes_on(
        self, request: RequestT, wait: PrefixWait, token_ids: TokenIds, now: float
    ) -> bool:
        """Whether the leader will publish more, and the index lacks part of the shared prefix."""
        leader = cast("RequestT", wait.leader)
        if not self._is_useful(request, leader, now) or _published(leader) >= wait.shared_len:
            return False
        kv_cache = self._context.kv_cache
        version = kv_cache.room_version
        if version == wait.looked_at:
            return True
        self._waits[request] = replace(wait, looked_at=version)
        return kv_cache.count_cached(token_ids, request.namespace) < wait.shared_len

    def _is_useful(self, request: RequestT, leader: RequestT, now: float) -> bool:
        """Whether the leader is expected to publish more before `request` could compute it."""
        if leader.has_ended or now - leader.progressed_at > self._bound:
            return False
        if not self._at_end(leader) and self._has_unpublished_pages(leader):
            return False
        return self._may_lead(leader) and self._leads_for(leader, request)

    def _has_unpublished_pages(self, leader: Request) -> bool:
        """Whether the leader has written whole pages that the index refused, e.g. as copies.

        Then the index refuses all later pages, too, until the leader is released.
        """
        page_size = self._context.kv_cache.shape.page_size
        return leader.lease is not None and leader.kv_written_len - _published(leader) >= page_size

    def _find(
        self, request: RequestT, token_ids: TokenIds, leaders: Iterable[RequestT], now: float
    ) -> PrefixWait | None:
        """Find the leader that shares most, if waiting for it is worth it."""
        found: int | None = None
        best: PrefixWait | None = None
        for leader in leaders:
            if leader.namespace != request.namespace or leader.priority > request.priority:
                continue
            if not self._is_useful(request, leader, now):
                continue
            if found is None:
                found = self._context.kv_cache.count_cached(token_ids, request.namespace)
            known = max(found, _published(leader), best.shared_len if best else 0)
            shared = self._shared_len(token_ids, leader, known)
            if shared > known:
                best = PrefixWait(leader, shared)
        return best

    def _shared_len(self, token_ids: TokenIds, leader: RequestT, known: int) -> int:
        """Count tokens of `token_ids` that a leader will publish; 0 if hardly beyond `known`."""
        theirs = leader.input_ids
        both = min(len(token_ids), len(theirs))
        shape = self._context.kv_cache.shape
        worth = max(shape.page_size, (len(token_ids) - known) // _WORTH)
        # Nearly all unrelated inputs differ here.
        if not np.array_equal(token_ids[known : known + worth], theirs[known : known + worth]):
            return 0
        differs = token_ids[:both] != theirs[:both]
        same = int(differs.argmax()) if differs.any() else both
        shared = same // shape.page_size * shape.page_size
        if shared - known < worth:
            return 0
        return shared if not self._at_end(leader) or self._is_worth_the_end(shared, leader) else 0

    def _is_worth_the_end(self, shared: int, leader: RequestT) -> bool:
        """Whether to wait until a leader's input is complete, because it publishes nothing earlier.

        In a model with windows all of it must be shared: after a part of it a window's pages would
        be missing.
        """
        shape = self._context.kv_cache.shape
        if any(shape.windowed):
            return shared == leader.input_len // shape.page_size * shape.page_size
        return 2 * shared >= leader.input_len


def _published(leader: Request) -> int:
    return 0 if leader.lease is None else leader.lease.cache_protected_len
