"""Grants the prefill workers' asks: reserves a whole prompt at once, or nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice

from kvrelay.decode_worker.live_requests import LiveRequests
from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.engine.scheduler.admission import admit_in_turn
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.prefix_waits import PrefixWaits
from kvrelay.kv_transfer.hand_over.states import DecodeState


class Grants:
    """Decides which requests that were asked for get memory.

    Args:
        context: the worker's memory and requests.
        requests: sends the grants.
        growth: what must stay free for those that have memory already.
        bypass_limit: later requests that may pass one that does not fit.
        grants_ahead: prompts that may have memory here before anything of them is announced.
        prefix_wait: seconds without progress for which a request waits for another's prefix.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: LiveRequests,
        growth: GrowthReserve,
        bypass_limit: int,
        grants_ahead: int,
        prefix_wait: float,
    ) -> None:
        self._context = context
        self._requests = requests
        self._growth = growth
        self._bypass_limit = bypass_limit
        self._grants_ahead = grants_ahead
        self._waits = PrefixWaits(context, prefix_wait, _is_pulled, at_end=True)

    def reserve_and_grant(self) -> None:
        """Reserve memory for the requests that were asked for, in turn, and grant them.

        Prefill workers take turns: the one with the fewest grants ahead is next. A request
        whose prefix is being read for another one waits for its activation.
        """
        live = self._context.requests.values()
        asked = [r for r in live if r.hand_over.state is DecodeState.ASKED]
        ahead = Counter(
            r.stream.peer.incarnation
            for r in live
            if r.hand_over.state is DecodeState.GRANTED and not r.hand_over.begun
        )
        free = max(0, self._grants_ahead - ahead.total())
        turns = _take_turns(asked, ahead)
        leaders = self._waits.leaders(live)
        admitted = admit_in_turn(
            self._context.kv_cache,
            asked,
            self._reserve,
            self._bypass_limit,
            turns.__getitem__,
            lambda r: self._waits.must_wait(r, r.input_len, leaders),
        )
        for request in islice(admitted, free):
            request.progressed_at = time.monotonic()
            leaders.append(request)
            # What the prefix index has here already, and what no window needs, is not read.
            protected = request.held.num_protected_pages
            first_missing = [max(first, protected) for first in request.held.first_pages]
            self._requests.send(request, request.hand_over.grant(first_missing))

    def _reserve(self, request: DecodeRequest) -> bool:
        """Allocate pages for the whole input, if what others are expected to add still fits.

        Pages that the prefix index has are shared.
        """
        kv_cache, length = self._context.kv_cache, request.input_len
        growing = [r for r in self._context.requests.values() if r.lease is not None]
        if not self._context.reserve(request, length, self._growth.headroom(request, growing)):
            return False
        kv_cache.slide(request.held, length)
        grown = kv_cache.grow(request.held, length)
        assert grown, "a promise was broken"
        return True


def _is_pulled(request: DecodeRequest) -> bool:
    """Whether a request has memory, and its input is not complete here."""
    return request.lease is not None and request.every_step is None


def _take_turns(
    asked: Iterable[DecodeRequest], ahead: Counter[str]
) -> dict[DecodeRequest, tuple[float, ...]]:
    """By priority, then the grants that its prefill worker will have ahead of it, then by age."""
    before = Counter(ahead)
    turns: dict[DecodeRequest, tuple[float, ...]] = {}
    for request in sorted(asked, key=lambda r: r.turn):
        peer = request.stream.peer.incarnation
        turns[request] = (request.priority, before[peer], request.arrived)
        before[peer] += 1
    return turns
