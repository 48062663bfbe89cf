"""One page of the host pool, and its part in a window's pool there: what each knows of itself."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto


class HostPageState(Enum):
    """Where a page is in its life."""

    WRITING = auto()
    """A copy writes it; nobody finds it."""
    CACHED = auto()
    """It is found. Copies and peers may read it, as many as `pins` says."""
    GONE = auto()
    """Nobody finds it; it is free once its copies, and the streams of its readers, have ended."""


class HostPage:
    """One page of the host pool, with what it holds.

    Args:
        key: its page hash.
        tokens: its own, four bytes each: a hit compares them.
        place: among the pages of its prompt, from 0.
        slot: its number in the host's pools without a window.
        parent: the page before; None: it is the first.
    """

    __slots__ = (
        *("children", "is_queued", "key", "parent", "parts", "pins", "place", "slot", "state"),
        *("stored", "tokens", "used"),
    )

    def __init__(
        self, key: bytes, tokens: bytes, place: int, slot: int, parent: HostPage | None
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.place = place
        self.slot = slot
        self.parent = parent
        self.state = HostPageState.WRITING
        self.pins = 0
        """Copies that read it, and streams whose decode workers may."""
        self.stored = False
        """The tier below has it, or is about to; a hint."""
        self.children: set[HostPage] = set()
        """The pages that continue it, of those that are here."""
        self.used = 0
        """When it was last used; see `EvictablePage`."""
        self.is_queued = False
        self.parts: dict[int, HostPart] = {}
        """By the pool's number its parts in windows' pools, as far as it has them; those that are
        being written, too. Changed by `HostWindow` alone."""

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted: nobody reads or continues it."""
        return not self.children and not self.pins and self.state is HostPageState.CACHED

    def path(self) -> Iterator[HostPage]:
        """This page and those before it."""
        page: HostPage | None = self
        while page is not None:
            yield page
            page = page.parent

    def subtree(self) -> Iterator[HostPage]:
        """This page and all that continue it."""
        todo = [self]
        while todo:
            page = todo.pop()
            todo += page.children
            yield page


class HostPart:
    """What one page holds in a window's pool.

    It has the states of a page: WRITING, then CACHED, and GONE with its page, or evicted by itself.

    Args:
        page: whose it is.
        slot: its number in the host's pool for that window.
    """

    __slots__ = ("is_queued", "page", "pins", "slot", "state", "used")

    def __init__(self, page: HostPage, slot: int) -> None:
        self.page = page
        self.slot = slot
        self.state = HostPageState.WRITING
        self.pins = 0
        """Copies that read it."""
        self.used = 0
        """When it was last used; see `EvictablePage`."""
        self.is_queued = False

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted: nobody reads it."""
        return not self.pins and self.state is HostPageState.CACHED
