"""The interface of a store of pages: the seam below the host pool.

A store keeps pages under their hashes (`wire/page_hash.py`), for later requests, also of other
workers. It may lose any of them at any time: that is a miss. It never gives wrong bytes.

One thread calls a store, and makes its progress. An operation that was begun is polled until it has
ended, even if its result is no longer wanted, because its bytes move until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvrelay.wire.load import PoolCounts
from kvrelay.wire.page_hash import HASH_BYTES

STORAGE: Final = "storage"
"""The pool's name: a label of its metrics."""
NOTHING_BEFORE: Final = bytes(HASH_BYTES)
"""The hash in place of the page before a prompt's first one."""


RETRY_SECONDS: Final = 60.0
"""Seconds after a failed write in which nothing is written."""


MOST_OPERATIONS: Final = 4
"""The most operations of a store at a time."""
MOST_PAGES: Final = 256
"""The most pages of one operation."""


@dataclass(frozen=True, slots=True)
class StoragePage:
    """A page of the host pool that goes to a store, or comes from one."""

    key: bytes
    """The page hash."""
    before: bytes
    """The hash of the page before; `NOTHING_BEFORE`: it is a prompt's first one."""
    tokens: bytes
    """The page's tokens, four bytes each; a page read under this hash must have the same."""
    slot: int
    """The page's number in the host's pools, where its bytes are, or come to."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """The state of a store, and its counts so far."""

    pool: PoolCounts | None
    """The account of the part that it fills by itself; None: another process keeps it."""
    evicted_pages: int = 0
    """Pages evicted to make room."""
    broken_pages: int = 0
    """Pages found truncated, foreign or corrupt when they were read, or opened, and removed."""
    write_error: str = ""
    """The reason why nothing is written at present; empty: pages are written."""


class StoreOperation(Protocol):
    """An interface to pages on their way to or from a store. It owns their memory until its end."""

    def poll(self) -> Sequence[bool] | None:
        """Make progress; does not block for long.

        Returns:
            None while it runs. At its end, once, whether each page is there: whether it came whole
            and unchanged, or the store has it now.
        """
        ...


class PageStore(Protocol):
    """An interface that keeps pages under their hashes.

    One thread calls it; no method blocks for long.
    """

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return whether each page of a row should be there. A hint; counts as a use of them."""
        ...

    def get(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """Begin to bring pages to the host."""
        ...

    def put(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """Begin to store pages of the host; pages that are there already are left as they are."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the pages of these hashes and their continuations that this worker wrote.

        Pages that are being written now are dropped, too.
        """
        ...

    def state(self) -> StoreState:
        """Get its present state."""
        ...

    def close(self) -> None:
        """Close it. Every operation must have ended."""
        ...
