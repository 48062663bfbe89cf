"""The states of one page of the host pool, and of its part in a window's pool there."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto


class HostPageState(Enum):
    """The state of a page."""

    WRITING = auto()
    """A copy writes the page; it is not found yet."""
    CACHED = auto()
    """The page is found. Copies and peers may read it, as counted by `pins`."""
    GONE = auto()
    """The page is no longer found; it is free once its copies, and its readers' streams, have
    ended."""


class HostPage:
    """One page of the host pool, with its identity and its links.

    Args:
        key: its page hash.
        tokens: its own, four bytes each: a hit compares them.
        place: its place among the pages of its prompt, from 0.
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
        """The number of copies that read it, and of streams whose decode workers may."""
        self.stored = False
        """Whether the tier below has it, or is about to; a hint."""
        self.children: set[HostPage] = set()
        """The pages here that continue it."""
        self.used = 0
        """The number of its last use; see `EvictablePage`."""
        self.is_queued = False
        self.parts: dict[int, HostPart] = {}
        """Its parts in windows' pools, by the pool's number, including those that are being
        written. Changed by `HostWindow` alone."""

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted: nothing reads or continues it."""
        return not self.children and not self.pins and self.state is HostPageState.CACHED

    def path(self) -> Iterator[HostPage]:
        """Yield this page and those before it."""
        page: HostPage | None = self
        while page is not None:
            yield page
            page = page.parent

    def subtree(self) -> Iterator[HostPage]:
        """Yield this page and all that continue it."""
        todo = [self]
        while todo:
            page = todo.pop()
            todo += page.children
            yield page


class HostPart:
    """The part of one page in a window's pool.

    It has the states of a page: WRITING, then CACHED. It becomes GONE with its page, or by its own
    eviction.

    Args:
        page: the page that it belongs to.
        slot: its number in the host's pool for that window.
    """

    __slots__ = ("is_queued", "page", "pins", "slot", "state", "used")

    def __init__(self, page: HostPage, slot: int) -> None:
        self.page = page
        self.slot = slot
        self.state = HostPageState.WRITING
        self.pins = 0
        """The number of copies that read it."""
        self.used = 0
        """The number of its last use; see `EvictablePage`."""
        self.is_queued = False

    @property
    def may_go(self) -> bool:
        """Whether it may be evicted: nothing reads it."""
        return not self.pins and self.state is HostPageState.CACHED
