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
    """NIXL has not taken the pages: nothing can be read into them."""
    moves: list[Pull] = field(default_factory=list)
    """Those after which bytes may still arrive, here or at the peer."""
    is_lent: bool = False
    """A measurement uses it."""

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
    """Lends each peer's measurement an area. Lives on one thread.

    An area stays its peer's while bytes may arrive in it: late bytes of one peer are never
    taken for another's, and no peer that hangs keeps others from being measured. There are as
    many areas as peers were ever measured at once, and peers with such moves besides.

    Args:
        make: allocates the pages of one more area, which are known to NIXL from then on. It
            is given what is to be called, on any thread, if NIXL does not take them.
    """

    def __init__(self, make: Callable[[Callable[[], None]], KVPool]) -> None:
        self._make = make
        self._of_peer: dict[str, LandingArea] = {}
        """Lent, or kept because bytes may still arrive."""
        self._free: list[LandingArea] = []

    @contextmanager
    def lend(self, peer: str) -> Iterator[LandingArea]:
        """An area for one measurement of a peer: the one that bytes of earlier ones may come to.

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
        """Take back the areas that no byte can arrive in any more; forget those of no use."""
        for peer, area in list(self._of_peer.items()):
            area.drop_passed()
            if not area.is_lent and not area.moves:
                del self._of_peer[peer]
                self._free.append(area)
        self._free = [area for area in self._free if not area.refused.is_set()]
