"""The owners of one pool's pages, and its free list (vLLM's `BlockPool`).

Only `PageAllocator` calls methods that change an owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.errors import ConservationError

Pages = npt.NDArray[np.int32]
"""Page ids, ``[n]``."""

Shares = Sequence[tuple[str, int]]
"""The holders for which pages move, and the number of pages for each, in order."""

NO_PAGES: Pages = np.empty(0, np.int32)

NO_PAGE: Final = -1
"""The entry of a table or a prefix where there is no page, as a window has passed it."""

HISTORY = 1024
"""The number of moves kept to explain a conservation fault."""


class Owner(IntEnum):
    """The owner of a page, or of a row. Each has exactly one."""

    FREE = 0
    """No owner: the page may be handed out."""
    LEASE = 1
    """A request."""
    INDEX = 2
    """The prefix index."""
    SESSION = 3
    """A session, between two of its turns."""
    QUARANTINE = 4
    """No owner, but something in flight may still read or write the page."""
    IN_FLIGHT = 5
    """A copy between tiers, which reads or writes it."""


@dataclass(frozen=True, slots=True)
class _Move:
    """One entry of the history: `pages` went from one owner to another."""

    shares: Shares
    pages: Pages
    source: Owner
    target: Owner

    def holder_of(self, page: int) -> str:
        """Find the holder for which one of `pages` moved."""
        ends = np.cumsum([number for _, number in self.shares])
        at = np.flatnonzero(self.pages == page)[0]
        return self.shares[int(np.searchsorted(ends, at, side="right"))][0]


class PageAccount:
    """The owners of one pool's pages, and a stack of those that are free.

    Args:
        name: of the pool; a label of its metrics.
        total: pages of the pool.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.owner_of = np.zeros(total, np.uint8)
        """The `Owner` of each page, ``[total]``; read only."""
        self.by_owner = [total, *([0] * (len(Owner) - 1))]
        """The number of pages of each `Owner`; read only."""
        self.times_allocated: npt.NDArray[np.uint32] | None = None
        """How often each page was handed out, ``[total]``; None before `count_allocations`."""
        # A stack; reversed, so that a fresh pool hands out neighbours in ascending order.
        self._free = np.arange(total, dtype=np.int32)[::-1].copy()
        self._history: deque[_Move] = deque(maxlen=HISTORY)

    @property
    def free_pages(self) -> Pages:
        """The pages that are free, a view; the last is handed out next."""
        return self._free[: self.by_owner[Owner.FREE]]

    def count_allocations(self) -> None:
        """Start to count how often each page is handed out, for readers without a lock."""
        self.times_allocated = np.zeros(self.total, np.uint32)

    def allocate(self, shares: Shares, target: Owner = Owner.LEASE) -> Pages:
        """Hand out free pages, to each holder its share. Enough pages must be free."""
        wanted = sum([number for _, number in shares])
        last = self.by_owner[Owner.FREE]
        assert wanted <= last, "more pages allocated than are free"
        pages = self._free[last - wanted : last][::-1].copy()
        self._change(shares, pages, Owner.FREE, target)
        if self.times_allocated is not None:
            self.times_allocated[pages] += 1
        return pages

    def move(self, shares: Shares, pages: Pages, source: Owner, target: Owner) -> None:
        """Change the owner of `pages`, of which each holder has its share.

        Raises:
            ConservationError: a page does not belong to `source`, or comes twice; names it and its
                history.
        """
        if not len(pages):
            return
        assert source is not Owner.FREE, "free pages are allocated"
        self._change(shares, pages, source, target)
        if target is Owner.FREE:
            free = self.by_owner[Owner.FREE]
            self._free[free - len(pages) : free] = pages[::-1]

    def _change(self, shares: Shares, pages: Pages, source: Owner, target: Owner) -> None:
        self.check_owner(pages, source)
        self._check_distinct(pages)
        self.owner_of[pages.astype(np.intp)] = target.value
        self.by_owner[source] -= len(pages)
        self.by_owner[target] += len(pages)
        self._history.append(_Move(shares, pages, source, target))

    def check_owner(self, pages: Pages, owner: Owner) -> None:
        """Raise `ConservationError` unless `owner` has all of `pages`."""
        if len(pages) and pages.min() < 0:
            raise ConservationError(f"{self.name}: {pages.min()} is no page")
        # Numpy is several times faster with plain integers, and with those of the machine's width.
        wrong = self.owner_of[pages.astype(np.intp)] != owner.value
        if np.count_nonzero(wrong):
            page = int(pages[wrong][0])
            raise ConservationError(
                f"{self.name} page {page} should be owned by {owner.name} and is by "
                f"{Owner(self.owner_of[page]).name}: {self.history(page)}"
            )

    def _check_distinct(self, pages: Pages) -> None:
        ordered = np.sort(pages)
        twice = ordered[1:] == ordered[:-1]
        if np.count_nonzero(twice):
            page = int(ordered[1:][twice][0])
            raise ConservationError(
                f"{self.name} page {page} moves twice at once: {self.history(page)}"
            )

    def history(self, page: int) -> str:
        """List the last owners of a page, oldest first."""
        moves = (move for move in self._history if page in move.pages)
        return "; ".join(f"{m.holder_of(page)}: {m.source.name} to {m.target.name}" for m in moves)
