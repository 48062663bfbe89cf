"""The reports to routers of the prefixes that a worker has: all of them at first, then changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.mem_cache.prefix.prefix_index import PrefixChanges, PrefixIndex
from kvrelay.wire.prefixes import PrefixUpdate

Marks: TypeAlias = tuple[int, ...]

_MARKS_AN_UPDATE: Final = 1 << 12
"""The most marks in one update, so that a router's event loop takes at most ten milliseconds for
it; longer reports are split."""
_MOST_UNREAD: Final = 1024
"""The most unread messages of a router. With more it is sent no changes, but everything anew once
it has read them."""


class PrefixReports:
    """The updates for each router's stream, pass by pass. On the engine thread only.

    Args:
        index: the worker's.
        page_size: tokens a page.
    """

    def __init__(self, index: PrefixIndex, page_size: int) -> None:
        self._index = index
        self._page_size = page_size
        self._told: dict[RouterLink, int | None] = {}
        """The number of updates that a router was sent; None: it must be sent everything anew."""

    def attach(self, link: RouterLink) -> None:
        """Add a router's stream."""
        self._told[link] = None

    def detach(self, link: RouterLink) -> None:
        """Remove a router's stream."""
        self._told.pop(link, None)

    def begin_anew(self, link: RouterLink) -> None:
        """Send everything anew to a router that has missed an update."""
        if link in self._told:
            self._told[link] = None

    def take(self) -> dict[RouterLink, Sequence[PrefixUpdate]]:
        """Take the updates to send after this pass, in order; most passes have none."""
        changes = self._index.take_changes()
        if changes is None and None not in self._told.values():
            return {}
        updates = {link: self._updates(link, changes) for link in self._told}
        return {link: some for link, some in updates.items() if some}

    def _updates(self, link: RouterLink, changes: PrefixChanges | None) -> Sequence[PrefixUpdate]:
        told, lags = self._told[link], link.num_unread > _MOST_UNREAD
        if lags or (changes is not None and changes.overflown):
            told = self._told[link] = None
        if lags:
            return ()
        if told is None:
            return self._all(link)
        if changes is None:
            return ()
        parts: list[tuple[Marks, Marks]] = [(part, ()) for part in _parts(changes.stored)]
        parts += [((), part) for part in _parts(changes.removed)]
        self._told[link] = told + len(parts)
        return [
            PrefixUpdate(number, self._page_size, stored=stored, removed=removed)
            for number, (stored, removed) in enumerate(parts, told)
        ]

    def _all(self, link: RouterLink) -> Sequence[PrefixUpdate]:
        """Make updates with all prefixes, from update 0 on; none if the index keeps no marks."""
        marks = self._index.marks()
        if marks is None:
            return ()
        updates = [
            PrefixUpdate(number, self._page_size, begins=not number, stored=part)
            for number, part in enumerate(_parts(marks) or [()])
        ]
        self._told[link] = len(updates)
        return updates


def _parts(marks: Marks) -> list[Marks]:
    """Split marks into parts of `_MARKS_AN_UPDATE`; none if there are no marks."""
    starts = range(0, len(marks), _MARKS_AN_UPDATE)
    return [marks[start : start + _MARKS_AN_UPDATE] for start in starts]
