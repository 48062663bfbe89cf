"""Who is let in next: in turn, but one that does not fit does not block the line for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvrelay.engine.request import Request
from kvrelay.mem_cache.ledger import Ledger

RequestT = TypeVar("RequestT", bound=Request)


def admit_in_turn(
    ledger: Ledger,
    waiting: Iterable[RequestT],
    reserve: Callable[[RequestT], bool],
    bypass_limit: int,
) -> Iterator[RequestT]:
    """Let in who fits, by priority and age; yields each one that `reserve` has taken memory for.

    A request that does not fit lets `bypass_limit` later ones pass, all in
    all; then those behind it wait until it fits. It is not looked at again
    until there is more room than there was.
    """
    misfit: RequestT | None = None
    room = ledger.room_version
    for request in sorted(waiting, key=lambda r: r.turn):
        if misfit is not None and misfit.bypassed >= bypass_limit:
            return
        if request.refused_at == room or not reserve(request):
            request.refused_at = room
            misfit = misfit or request
            continue
        if misfit is not None:
            misfit.bypassed += 1
        yield request
