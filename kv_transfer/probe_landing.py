"""Landing areas: scratch pages that probes read into, some for each peer that is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.pool import KVPool

_UNENDED = (PullState.QUEUED, PullState.RUNNING)


@dataclass(eq=False, slots=True)
class LandingArea:
    """Pages that one peer's bytes arrive in, and the moves of its probes."""

    pages: KVPool
    refused: threading.Event
    """Set if NIXL has refused the pages: nothing can be read into them."""
    moves: list[Pull] = field(default_factory=list)
    """The moves after which bytes may still arrive, here or at the peer."""
    is_lent: bool = False
    """Whether a measurement uses it."""

    def add(self, move: Pull) -> None:
        """Note a move that begins now."""
        self.moves.append(move)

    def drop_passed(self) -> None:
        """Forget the moves after which no byte can arrive any more."""
        self.moves = [move for move in self.moves if not move.passed()]

    @property
    def has_running_move(self) -> bool:
        """Whether a move of an earlier measurement has not ended."""
        return any(move.state in _UNENDED for move in self.moves)


class LandingAreas:
    """The areas lent to measurements, one for each peer. Used on one thread.

    An area stays with its peer while bytes may arrive in it. So late bytes of one peer are never
    taken for another's, and a peer that hangs does not block others. There are as many areas as
    peers that were ever measured at once, and one more for each peer with unended moves.

    Args:
        make: allocates the pages of one more area, and registers them with NIXL. Its argument is
            called, on any thread, if NIXL refuses them.
    """

    def __init__(self, make: Callable[[Callable[[], None]], KVPool]) -> None:
        self._make = make
        self._of_peer: dict[str, LandingArea] = {}
        """The area of each peer that is lent, or kept because bytes may still arrive."""
        self._free: list[LandingArea] = []

    @contextmanager
    def lend(self, peer: str) -> Iterator[LandingArea]:
        """Lend an area for one measurement of a peer; the same while earlier bytes may arrive.

        Raises:
            TransferError: an earlier measurement of this peer has not ended yet.
        """
        self._reclaim()
        area = self._of_peer.get(peer)
        if area is None:
            area = self._of_peer[peer] = self._free.pop() if self._free else self._new()
        if area.is_lent or area.has_running_move:
            raise TransferError(f"{peer}: an earlier probe has not ended yet")
        area.is_lent = True
        try:
            yield area
        finally:
            area.is_lent = False

    def _new(self) -> LandingArea:
        refused = threading.Event()
        return LandingArea(self._make(refused.set), refused)

    def _reclaim(self) -> None:
        """Take back areas in which no byte can arrive any more; drop areas that NIXL refused."""
        for peer, area in list(self._of_peer.items()):
            area.drop_passed()
            if not area.is_lent and not area.moves:
                del self._of_peer[peer]
                self._free.append(area)
        self._free = [area for area in self._free if not area.refused.is_set()]
