"""Lets a request wait while what it needs comes back from a lower tier, if that is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.request import Request, TierLoad
from kvrelay.mem_cache.host_tier import HostPrefix, HostTier

RequestT = TypeVar("RequestT", bound=Request)

_UNKNOWN: Final = 4
"""Before any prompt was measured, a request waits so many times as long as a load should take."""
_LEAST_PATIENCE_SECONDS: Final = 0.02
"""And this besides: a thread may have to be woken."""


class TierLoads(Generic[RequestT]):
    """Brings back what waiting requests lack, and tells how long each waits for that.

    A request waits without memory. It goes on when its load has ended, and no later than it
    could have computed the same itself: what comes then is for others.

    Args:
        context: has the tier, and what steps cost.
    """

    def __init__(self, context: SchedulerContext[RequestT]) -> None:
        self._context = context
        self._tier = context.host_tier

    def must_wait(
        self,
        request: RequestT,
        known_tokens: int,
        headroom: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> bool:
        """Whether a request should wait; begins a load for it, once, if that is worth it.

        Args:
            request: has no memory.
            known_tokens: tokens of its input that may come from a cache.
            headroom: says the pages of each pool that must stay free for others.
        """
        if self._tier is None or self._context.sessions.has_kv_of(request):
            return False
        if request.tier_load is None:
            request.tier_load = self._begin(self._tier, request, known_tokens, headroom)
            if request.tier_load is None:
                return False
        wait = request.tier_load
        if wait.load.ended or wait.load.given_up:
            return False
        if self._context.kv_cache.clock() < wait.until:
            return True
        self._tier.give_up(wait.load)
        return False

    def _begin(
        self,
        tier: HostTier,
        request: Request,
        known_tokens: int,
        headroom: Callable[[], Sequence[int] | None],
    ) -> TierLoad | None:
        """Begin a load if there is something to load, room for it, and reason to."""
        kv_cache = self._context.kv_cache
        version = (kv_cache.room_version, tier.version)
        if request.tier_looked_at == version:
            return None
        request.tier_looked_at = version
        token_ids = request.input_ids[:known_tokens]
        if not request.tier_keys:
            request.tier_keys = tier.hash(token_ids, request.namespace)
        found = tier.find(token_ids, request.namespace, request.tier_keys)
        if found is None:
            return None
        seconds = self._patience(tier, found)
        if not seconds:
            tier.counts.slow_loads += 1
            return None
        shape = kv_cache.shape
        rest = shape.pages_for(request.input_len) - shape.pages_for(len(found.token_ids))
        spare = headroom() or [0] * len(shape.pools)
        load = tier.load(found, [pages + rest for pages in spare])
        if load is None:
            return None
        self._context.wake_in(seconds)
        return TierLoad(load, kv_cache.clock() + seconds)

    def _patience(self, tier: HostTier, found: HostPrefix) -> float:
        """Seconds that a load may take: those of computing the same. 0: it would take longer."""
        expected = tier.expected_seconds(found)
        speeds = self._context.speed_learner.speeds
        if not speeds.prompts_known:
            return _UNKNOWN * expected + _LEAST_PATIENCE_SECONDS
        context = len(found.token_ids) - found.num_tokens
        computing = speeds.prompt_seconds(found.num_tokens, context)
        return computing if expected < computing else 0.0
