"""The memory grants of a decode worker: for a whole prompt at once, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.lent_histories import LentHistories
from kvrelay.decode_worker.readable_hosts import ReadableHosts
from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.admit_in_turn import AdmissionInTurn
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.prefix_waits import PrefixWaits
from kvrelay.engine.scheduler.tier_loads import TierLoads

MOST_HELD = 256
"""The most requests of one prefill worker that wait for another's prefix, or for memory after that.
It may ask for as many beyond those that it asks for ahead. A further request does not wait, and
reads the shared prefix again."""


class Grants:
    """The queue of the prefill workers' asks and of the prompts that are computed here.

    A request that is granted, or computed, holds memory for its whole prompt.

    Args:
        context: the worker's memory and requests.
        requests: sends the grants, and computes prompts.
        growth: tells the memory that must stay free for requests that run.
        bypass_limit: later requests that may pass one that does not fit.
        grants_ahead: prompts that may have memory here before they are computed.
        prefix_wait: seconds without progress for which a request waits for another's prefix.
        histories: lends sessions' pages with grants.
        hosts: knows the prefill workers whose hosts can be read.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        growth: GrowthReserve,
        bypass_limit: int,
        grants_ahead: int,
        prefix_wait: float,
        histories: LentHistories,
        hosts: ReadableHosts,
    ) -> None:
        self._context = context
        self._requests = requests
        self._computing = requests.steps.computing
        self._growth = growth
        self._admission = AdmissionInTurn(context, self._reserve, bypass_limit)
        self._grants_ahead = grants_ahead
        self._loads = TierLoads(context)
        self._histories = histories
        self._hosts = hosts
        self._waits = PrefixWaits(context, prefix_wait, _is_incomplete, at_end=_is_handed_over)

    def reserve_and_grant(self) -> None:
        """Reserve memory for the requests that want some, in turn; grant or compute them.

        Prefill workers take turns: the one with the fewest grants ahead is next. This worker's own
        prompts count as having no grants ahead. So one of them goes before all asks of a prefill
        worker that has a grant ahead, however old they are. A request waits if its prefix is being
        read, or computed, for another one.
        """
        live = self._context.requests.values()
        waiting = [r for r in live if r.wants_memory]
        if not waiting:
            return
        ahead = Counter(r.peer for r in live if isinstance(r, HandedOverRequest) and r.is_ahead)
        free = self._grants_ahead - ahead.total()
        leaders = self._waits.leaders(live)
        held = Counter(r.peer for r in waiting if _is_held(r))

        def must_wait(request: DecodeRequest) -> bool:
            if free <= 0 and _is_handed_over(request):
                return True
            return self._must_wait(request, leaders, held)

        turns = _take_turns(waiting, ahead)
        for request in self._admission.admit(waiting, turns.__getitem__, must_wait):
            leaders.append(request)
            if isinstance(request, HandedOverRequest):
                free -= 1
                self._grant(request)

    def _grant(self, request: HandedOverRequest) -> None:
        """Send a request's prefill worker the grant, with the pages that need not be read.

        These are the pages that the prefix index or the request's session has here, and those that
        no window needs.
        """
        page_size = self._context.kv_cache.shape.page_size
        here = request.held.kv_committed_len // page_size
        first_missing = [max(first, here) for first in request.held.first_pages]
        history = self._histories.of(request)
        reads_host = self._hosts.may_read(request.peer)
        grant = request.hand_over.grant(first_missing, history, reads_host=reads_host)
        self._requests.send(request, grant)
        request.enter(Phase.GRANTED)

    def _must_wait(
        self, request: DecodeRequest, leaders: Iterable[DecodeRequest], held: Counter[str]
    ) -> bool:
        """Whether a request waits for one of the leaders. Its prefill worker is told if it does.

        The prefill worker may then ask for other requests in its place. `held` counts these by
        prefill worker.
        """
        if request.peer and not _is_held(request) and held[request.peer] >= MOST_HELD:
            return False
        if not self._waits.must_wait(request, request.findable_len, leaders):
            return self._waits_for_tier(request)
        if isinstance(request, HandedOverRequest):
            message = request.hand_over.hold()
            if message is not None:
                held[request.peer] += 1
                self._requests.send(request, message)
        return True

    def prefetch(self, request: DecodeRequest) -> None:
        """Begin to bring pages from storage for a queued request that is computed here."""
        self._loads.prefetch(request, request.reusable_len)

    def _waits_for_tier(self, request: DecodeRequest) -> bool:
        """Whether a lower tier brings back pages that would be computed here.

        Pages that a prefill worker computes are read while it computes, so no request waits for a
        tier then.
        """
        if _is_handed_over(request):
            return False
        return self._loads.must_wait(request, request.reusable_len, lambda: self._headroom(request))

    def _headroom(self, request: DecodeRequest) -> Sequence[int] | None:
        growing = [r for r in self._context.requests.values() if r.lease is not None]
        return self._growth.headroom(request, growing)

    def _reserve(self, request: DecodeRequest) -> bool:
        """Reserve a request's whole input, if the expected growth of others still fits.

        Pages that the prefix index has are shared; those of its session go on with it.
        """
        headroom = self._headroom(request)
        if isinstance(request, HandedOverRequest):
            return self._allocate(request, headroom)
        return self._computing.reserve_and_add(request, headroom)

    def _allocate(self, request: HandedOverRequest, headroom: Sequence[int] | None) -> bool:
        """Allocate all pages of an input, as its prefill worker may announce them in any order."""
        kv_cache, length = self._context.kv_cache, request.findable_len
        if not self._context.reserve(request, length, headroom, fresh_boundary=True):
            return False
        kv_cache.slide(request.held, length)
        grown = kv_cache.grow(request.held, length)
        assert grown, "a promise was broken"
        return True


def _is_incomplete(request: DecodeRequest) -> bool:
    """Whether a request has memory, but its input is not complete here."""
    return request.lease is not None and request.every_step is None


def _is_handed_over(request: DecodeRequest) -> bool:
    """Whether a prefill worker computes a request, which is published whole at its activation."""
    return isinstance(request, HandedOverRequest)


def _is_held(request: DecodeRequest) -> bool:
    """Whether the prefill worker of a request was told that this request waits."""
    return isinstance(request, HandedOverRequest) and request.hand_over.is_held


def _take_turns(
    waiting: Iterable[DecodeRequest], ahead: Counter[str]
) -> dict[DecodeRequest, tuple[float, ...]]:
    """Sort requests by priority, by the prompts that their prefill worker has ahead, and by age."""
    before = Counter(ahead)
    turns: dict[DecodeRequest, tuple[float, ...]] = {}
    for request in sorted(waiting, key=lambda r: r.turn):
        turns[request] = (request.priority, before[request.peer], request.arrived)
        before[request.peer] += 1
    return turns
