"""The wait of a request while its pages come back from a lower tier, if that is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.host.host_copies import HostPrefix, Load
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.storage_tier import Prefetch, StorageTier
from kvrelay.mem_cache.prefix.prefix_index import TokenIds

RequestT = TypeVar("RequestT", bound=Request)

_UNKNOWN: Final = 4
"""The factor on a load's expected time that a request waits, before any prompt was measured."""
_LEAST_PATIENCE_SECONDS: Final = 0.02
"""Seconds added to that wait, because a thread may have to be woken."""
_MOST_UNKNOWN_SECONDS: Final = 0.5
"""The longest such wait for storage, which may be slow, on a worker that has just started."""
_MOST_LOADS: Final = 2
"""The most loads for one request: while it waits for one, others take the room that it had
found."""
_LOOK_SECONDS: Final = 0.05
"""The longest wait until storage says what it has; after that the request waits for the pages."""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Pages that a request waits for, which come back from a lower tier."""

    load: Load
    since: float
    """The moment when the load was begun, by the cache's clock."""
    until: float
    """The moment, by the cache's clock, after which the request stops waiting."""


@dataclass(eq=False, slots=True)
class StorageWait:
    """Pages that come from storage to the host for a request."""

    prefetch: Prefetch
    num_pages: int
    """Whole pages of its input that may come."""
    since: float | None = None
    """The moment, by the cache's clock, from which it could have begun without them; None: not
    yet."""
    left_at: float | None = None
    """The moment when the request went on without them; None: it has not."""
    wakes_at: float | None = None
    """The moment when the loop looks again whether the request still waits."""

    @property
    def ends_at(self) -> float | None:
        """The moment when the request stopped waiting for them; None: it still waits."""
        return self.prefetch.ended_at if self.left_at is None else self.left_at

    def seconds(self, now: float) -> float:
        """Compute how long the request has waited for them by now, though it could have begun."""
        if self.since is None:
            return 0.0
        return max(0.0, (now if self.ends_at is None else self.ends_at) - self.since)


@dataclass(eq=False, slots=True)
class TierWait:
    """The wait of one request for what lower tiers have of it."""

    keys: bytes = b""
    """The page hashes of its reusable input, computed when first needed."""
    storage_asked: bool = False
    """Whether storage was asked what it has of its input."""
    looked_at: tuple[int, int] = (-1, -1)
    """The versions of cache and tier at which nothing was to be brought back for it."""
    load: TierLoad | None = None
    """The load that brings pages back for it, or the last one that did."""
    loads_begun: int = 0
    """The number of loads that it has waited for, the current one included."""
    load_seconds: float = 0.0
    """Seconds that it has waited for loads before the last one."""
    storage: StorageWait | None = None
    """The wait for pages that storage brings, or has brought, to the host."""


class TierLoads(Generic[RequestT]):
    """The loads that bring back what waiting requests lack, and how long each request waits.

    A request waits without memory. It goes on when its load has ended, or when it could have
    computed the same itself. Pages that come later are for others. Pages in storage come to the
    host first, from when the request is queued. That counts as part of the wait.

    Args:
        context: has the tier, and what steps cost.
    """

    def __init__(self, context: SchedulerContext[RequestT]) -> None:
        self._context = context
        self._tier = context.host_tier
        self._storage = None if self._tier is None else self._tier.storage
        self._waits: dict[Request, TierWait] = {}
        context.on_release(self._forget)

    def wait_of(self, request: Request) -> TierWait:
        """Get the wait of a live request; it is dropped when the request is released."""
        wait = self._waits.get(request)
        if wait is None:
            wait = self._waits[request] = TierWait()
        return wait

    def _forget(self, request: Request) -> None:
        """Give up what storage still brings for a request that needs it no more."""
        wait = self._waits.pop(request, None)
        if wait is None or wait.storage is None or wait.storage.left_at is not None:
            return
        assert self._storage is not None, "what is waited for has no storage"
        wait.storage.left_at = self._context.kv_cache.clock()
        self._storage.leave(wait.storage.prefetch)

    def prefetch(self, request: RequestT, known_tokens: int) -> None:
        """Begin to bring a queued request's pages from storage to the host.

        Does nothing if earlier requests may fill half of the host, because the pages would be
        evicted again.

        Args:
            request: has no memory.
            known_tokens: tokens of its input that may come from a cache.
        """
        if self._storage is not None and self._has_room_ahead():
            self._prefetch(request, known_tokens)

    def _has_room_ahead(self) -> bool:
        waits = [wait.storage for one, wait in self._waits.items() if one.lease is None]
        ahead = sum([wait.num_pages for wait in waits if wait is not None and wait.left_at is None])
        return self._tier is not None and 2 * ahead < self._tier.pages.total

    def _prefetch(self, request: RequestT, known_tokens: int) -> None:
        """Begin to bring a request's pages from storage to the host, once."""
        if self._tier is None or self._storage is None:
            return
        wait = self.wait_of(request)
        if wait.storage_asked or not known_tokens or self._context.session_turns.has_kv_of(request):
            return
        wait.storage_asked = True
        token_ids = request.input_ids[:known_tokens]
        keys, tokens = self._tier.split(token_ids, self.keys_of(request, token_ids))
        tier, storage = self._tier, self._storage

        def is_worth(first: int, pages: int) -> bool:
            on_device = self._pages_on_device(request, known_tokens)
            return self._is_worth(tier, storage, first, pages, on_device)

        fetched = storage.prefetch(keys, tokens, is_worth) if keys else None
        if fetched is not None:
            wait.storage = StorageWait(fetched, len(keys))

    def must_wait(
        self,
        request: RequestT,
        known_tokens: int,
        headroom: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> bool:
        """Whether a request should wait. Begins a load for it, once, if that is worth it.

        Args:
            request: has no memory.
            known_tokens: tokens of its input that may come from a cache.
            headroom: returns the pages of each pool that must stay free for others.
        """
        if self._tier is None or self._context.session_turns.has_kv_of(request):
            return False
        if self._waits_for_storage(request, known_tokens):
            return True
        wait = self.wait_of(request)
        if wait.load is None:
            wait.load = self._begin(self._tier, request, known_tokens, headroom)
            if wait.load is None:
                return False
            wait.loads_begun += 1
        load = wait.load.load
        if load.given_up:
            return False
        if load.ended_at is not None:
            if wait.loads_begun == _MOST_LOADS:
                return False
            # No request holds the pages that came. If some were evicted before there was room for
            # the rest, they are loaded again.
            wait.load_seconds += load.ended_at - wait.load.since
            wait.load = None
            return self.must_wait(request, known_tokens, headroom)
        if self._context.kv_cache.clock() < wait.load.until:
            return True
        self._tier.loads.give_up(load)
        return False

    def _waits_for_storage(self, request: RequestT, known_tokens: int) -> bool:
        """Whether a request's pages are still coming from storage to the host, and in time."""
        self._prefetch(request, known_tokens)
        wait, storage = self.wait_of(request).storage, self._storage
        if storage is None or wait is None or wait.ends_at is not None:
            return False
        now = self._context.kv_cache.clock()
        if wait.since is None:
            wait.since = now
        on_device = self._pages_on_device(request, known_tokens)
        patience = 0.0 if storage.hangs else self._storage_patience(storage, wait, on_device)
        until = wait.since + patience
        if until > now:
            if until != wait.wakes_at:
                wait.wakes_at = until
                self._context.wake_in(until - now)
            return True
        storage.counts.late_loads += now > wait.since
        wait.left_at = until
        storage.leave(wait.prefetch)
        return False

    def _pages_on_device(self, request: Request, known_tokens: int) -> int:
        kv_cache, token_ids = self._context.kv_cache, request.input_ids[:known_tokens]
        return kv_cache.count_cached(token_ids, request.namespace) // kv_cache.shape.page_size

    def _storage_patience(self, storage: StorageTier, wait: StorageWait, on_device: int) -> float:
        """Compute the seconds that a request waits: at most the time to compute the pages."""
        found, here = wait.prefetch.num_found, max(wait.prefetch.num_here, on_device)
        pages = min(found or wait.num_pages, wait.num_pages) - here
        if pages <= 0:
            return 0.0
        seconds = self._seconds_to_compute(here, pages)
        if seconds is None:
            expected = _UNKNOWN * storage.expected_seconds(pages)
            seconds = min(expected + _LEAST_PATIENCE_SECONDS, _MOST_UNKNOWN_SECONDS)
        return seconds if found else min(seconds, _LOOK_SECONDS)

    def _is_worth(
        self, tier: HostTier, storage: StorageTier, first: int, pages: int, on_device: int
    ) -> bool:
        """Whether pages from storage, by way of the host, come sooner than they are computed.

        Pages that the device has need not be computed, but are loaded with those behind them.
        """
        start = max(first, on_device)
        lacking = first + pages - start
        if lacking <= 0:
            return False
        computing = self._seconds_to_compute(start, lacking)
        to_device = tier.loads.speed.seconds(lacking * tier.page_bytes)
        expected = storage.expected_seconds(pages) + to_device
        return expected < (_MOST_UNKNOWN_SECONDS if computing is None else computing)

    def _seconds_to_compute(self, first: int, pages: int) -> float | None:
        """Estimate the seconds to compute `pages` behind `first` pages; None: unmeasured."""
        speeds, size = self._context.speed_learner.speeds, self._context.kv_cache.shape.page_size
        return speeds.prompt_seconds(pages * size, first * size) if speeds.prompts_known else None

    def keys_of(self, request: Request, token_ids: TokenIds) -> bytes:
        """Get the page hashes of a request's reusable input, computed once; there is a tier."""
        assert self._tier is not None, "no tier has anything by a hash"
        wait = self.wait_of(request)
        if not wait.keys:
            wait.keys = self._tier.hash(token_ids, request.namespace)
        return wait.keys

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
        wait = self.wait_of(request)
        if wait.looked_at == version:
            return None
        wait.looked_at = version
        token_ids = request.input_ids[:known_tokens]
        keys = self.keys_of(request, token_ids)
        found = tier.loads.find(token_ids, request.namespace, keys)
        if found is None:
            return None
        seconds = self._patience(tier, found, request)
        if seconds <= 0:
            tier.counts.slow_loads += 1
            return None
        spare = headroom() or [0] * len(kv_cache.shape.pools)
        begun = self._load(tier, request, found, seconds, spare)
        sessions = self._context.session_turns
        can_help = begun is None and len(sessions) > 0
        if can_help and sessions.fits_without_sessions(request, known_tokens, spare):
            begun = self._load_in_their_room(tier, request, token_ids, spare)
        return begun

    def _load(
        self,
        tier: HostTier,
        request: Request,
        found: HostPrefix,
        seconds: float,
        spare: Sequence[int],
    ) -> TierLoad | None:
        """Begin a load that may take `seconds`, if it and the rest of the request have room."""
        shape, most = self._context.kv_cache.shape, self._context.kv_cache.shape.most_pages
        whole, part = request.input_len, len(found.token_ids)
        rest = [most(pool, whole) - most(pool, part) for pool in shape.pool_numbers]
        load = tier.loads.load(
            found, [pages + more for pages, more in zip(spare, rest, strict=True)]
        )
        if load is None:
            return None
        self._context.wake_in(seconds)
        now = self._context.kv_cache.clock()
        return TierLoad(load, now, now + seconds)

    def _load_in_their_room(
        self, tier: HostTier, request: Request, token_ids: TokenIds, spare: Sequence[int]
    ) -> TierLoad | None:
        """Begin a load in the room of idle sessions, which computing would end, too.

        Their pages may hold a part of the prefix. Then less is left to load, and the request waits
        no longer than for computing that.
        """
        begun = None
        while begun is None and self._context.session_turns.evict_oldest():
            found = tier.loads.find(token_ids, request.namespace, self.keys_of(request, token_ids))
            if found is None:
                return None
            seconds = self._patience(tier, found, request)
            if seconds <= 0:
                return None
            begun = self._load(tier, request, found, seconds, spare)
        return begun

    def _patience(self, tier: HostTier, found: HostPrefix, request: Request) -> float:
        """Compute the seconds that a load may take: those of computing it, less earlier waits.

        A result of 0 or less means that it would take longer.
        """
        expected = tier.expected_seconds(found)
        speeds = self._context.speed_learner.speeds
        if not speeds.prompts_known:
            return _UNKNOWN * expected + _LEAST_PATIENCE_SECONDS
        context = len(found.token_ids) - found.num_tokens
        wait = self.wait_of(request)
        left = speeds.prompt_seconds(found.num_tokens, context) - wait.load_seconds
        if wait.storage is not None:
            left -= wait.storage.seconds(self._context.kv_cache.clock())
        return left if expected < left else 0.0
