"""The admission of waiting requests in turn. One that does not fit lets a few later ones pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager

RequestT = TypeVar("RequestT", bound=Request)


def admit_in_turn(
    kv_cache: KVCacheManager,
    waiting: Iterable[RequestT],
    reserve: Callable[[RequestT], bool],
    bypass_limit: int,
    turn: Callable[[RequestT], tuple[float, ...]] = lambda request: request.turn,
    must_wait: Callable[[RequestT], bool] = lambda request: False,
) -> Iterator[RequestT]:
    """Reserve memory for the requests that fit, in turn, and yield each of them.

    A request that does not fit lets `bypass_limit` later ones pass in all. Then those behind it
    wait until it fits. It is not tried again before some memory was freed.

    Args:
        kv_cache: tells whether memory was freed since a request last did not fit.
        waiting: requests without memory, in any order.
        reserve: takes a request's memory; `False` if it does not fit.
        bypass_limit: later requests that may be admitted before the first that does not fit.
        turn: the sort key of the requests; by default priority and age.
        must_wait: whether to skip a request for now, as if it had not come yet.
    """
    misfit: RequestT | None = None
    room = kv_cache.room_version
    for request in sorted(waiting, key=turn):
        if misfit is not None and misfit.bypassed >= bypass_limit:
            return
        if must_wait(request):
            continue
        if request.refused_at == room or not reserve(request):
            request.refused_at = room
            misfit = misfit or request
            continue
        if misfit is not None:
            misfit.bypassed += 1
        yield request
