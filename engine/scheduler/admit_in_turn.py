"""The admission of waiting requests in turn. One that does not fit lets a few later ones pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.request import Request

RequestT = TypeVar("RequestT", bound=Request)


@dataclass(eq=False, slots=True)
class _Misfit:
    """A request that has not fitted."""

    refused_at: int
    """The `KVCacheManager.room_version` when it last did not fit; until that changes it cannot
    fit."""
    bypassed: int = 0
    """Later requests that were admitted meanwhile."""


class AdmissionInTurn(Generic[RequestT]):
    """Reserves memory for the requests that fit, in turn.

    A request that does not fit lets `bypass_limit` later ones pass in all; then
    those behind it wait until it fits. It is not tried again before some memory
    was freed.

    Args:
        context: tells whether memory was freed since a request last did not fit.
        reserve: takes a request's memory; `False` if it does not fit.
        bypass_limit: later requests that may be admitted before the first that does not fit.
    """

    def __init__(
        self,
        context: SchedulerContext[RequestT],
        reserve: Callable[[RequestT], bool],
        bypass_limit: int,
    ) -> None:
        self._kv_cache = context.kv_cache
        self._reserve = reserve
        self._bypass_limit = bypass_limit
        self._misfits: dict[Request, _Misfit] = {}
        context.on_release(lambda request: self._misfits.pop(request, None))

    def admit(
        self,
        waiting: Iterable[RequestT],
        turn: Callable[[RequestT], tuple[float, ...]] = lambda request: request.turn,
        must_wait: Callable[[RequestT], bool] = lambda request: False,
    ) -> Iterator[RequestT]:
        """Yield each request as soon as it has memory.

        Args:
            waiting: requests without memory, in any order.
            turn: orders them; by priority and age if not told otherwise.
            must_wait: passes a request over for now, as if it had not come yet.
        """
        first: _Misfit | None = None
        room = self._kv_cache.room_version
        for request in sorted(waiting, key=turn):
            if first is not None and first.bypassed >= self._bypass_limit:
                return
            if must_wait(request):
                continue
            misfit = self._misfits.get(request)
            if (misfit is not None and misfit.refused_at == room) or not self._reserve(request):
                misfit = self._misfits.setdefault(request, _Misfit(room))
                misfit.refused_at = room
                first = first or misfit
                continue
            self._misfits.pop(request, None)
            if first is not None:
                first.bypassed += 1
            yield request
