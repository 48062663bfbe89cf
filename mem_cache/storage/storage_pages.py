"""What a tier of storage is asked for, and what does it: the seam below the host pool.

A store keeps pages under their hashes (`wire/page_hash.py`), for whoever comes later, other
workers included. It may lose any of them at any time: that is a miss. It never gives wrong bytes.

One thread calls a store, and makes its progress: an operation that was begun is polled until it
has ended, whatever became of whoever wanted it, because its bytes move until then.
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
"""Stands for the hash of the page before a prompt's first one."""


RETRY_SECONDS: Final = 60.0
"""After a write has failed nothing is written for so long."""


MOST_OPERATIONS: Final = 4
"""Operations of a store at a time."""
MOST_PAGES: Final = 256
"""Of one operation."""


@dataclass(frozen=True, slots=True)
class StoragePage:
    """A page of the host pool that goes to a store, or comes from one."""

    key: bytes
    """Its page hash."""
    before: bytes
    """That of the page before; `NOTHING_BEFORE`: it is a prompt's first one."""
    tokens: bytes
    """Its own, four bytes each: what comes back under its hash has the same."""
    slot: int
    """Its number in the host's pools: where its bytes are, or come to."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """What a store has, and what has become of its pages so far."""

    pool: PoolCounts | None
    """The account of what it may fill by itself; None: another process keeps it."""
    evicted_pages: int = 0
    """To make room."""
    broken_pages: int = 0
    """Truncated, foreign or corrupt: found when they were read, or opened, and removed."""
    write_error: str = ""
    """Why nothing is written at present; empty: it is."""


class StoreOperation(Protocol):
    """Pages that go to a store, or come from it. Their memory is the operation's until its end."""

    def poll(self) -> Sequence[bool] | None:
        """Make progress; does not block for long.

        Returns:
            None while it runs. At its end, once, which pages are there: those that came whole
            and unchanged, or those that the store has now.
        """
        ...


class PageStore(Protocol):
    """Keeps pages under their hashes. One thread calls it; no method blocks for long."""

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which pages of a prompt, neighbours, should be there. A hint, and a use of them."""
        ...

    def get(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """Begin to bring pages to the host."""
        ...

    def put(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """Begin to keep pages of the host; those that are there already are left as they are."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Keep no page of these hashes, nor what continues them, as far as this worker wrote it.

        Nor what is being written now, if it is one of these.
        """
        ...

    def state(self) -> StoreState:
        """What it has now."""
        ...

    def close(self) -> None:
        """End. Every operation has ended."""
        ...
