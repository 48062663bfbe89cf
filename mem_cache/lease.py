"""What a request holds.

A lease's tokens, as intervals and their owners::

    0 ........ cache_protected_len ........ kv_committed_len ........ kv_allocated_len
    |  prefix index owns,         |  this lease owns,         |  this lease owns,     |
    |  this lease locks           |  written, or will be by   |  reserved             |
    |                             |  a forward launched       |                       |

Always ``0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len``, and
`cache_protected_len` is a multiple of the page size. The lengths are recorded
when they change, by the ledger alone; nobody infers them from token counts.
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kvrelay.mem_cache.errors import LedgerError
from kvrelay.mem_cache.prefix_index import PrefixLock


class LeaseState(Enum):
    """Where a lease is in its life; it only moves downwards in this list."""

    OPEN = auto()
    """May grow and commit."""
    CLOSED = auto()
    """Its end is decided: it may only be released."""
    RELEASED = auto()
    """Holds nothing any more."""


class Lease:
    """One request's hold on a row and on pages. Made by `Ledger.open`.

    Only the ledger writes the underscored fields.
    """

    __slots__ = (
        "_cache_protected_len",
        "_kv_allocated_len",
        "_kv_committed_len",
        "_page_table",
        "_prefix_lock",
        "_promised_pages",
        "_published_pages",
        "_state",
        "holder",
        "page_size",
        "row",
    )

    def __init__(
        self,
        holder: str,
        row: int,
        page_table: npt.NDArray[np.int32],
        page_size: int,
        prefix_lock: PrefixLock,
        promised_pages: int,
    ) -> None:
        self.holder = holder
        self.row = row
        self.page_size = page_size
        self._page_table = page_table
        self._prefix_lock = prefix_lock
        self._promised_pages = promised_pages
        self._published_pages: frozenset[int] = frozenset()
        self._state = LeaseState.OPEN
        matched = len(prefix_lock.pages) * page_size
        self._cache_protected_len = matched
        self._kv_committed_len = matched
        self._kv_allocated_len = matched

    @property
    def state(self) -> LeaseState:
        """Where the lease is in its life."""
        return self._state

    @property
    def cache_protected_len(self) -> int:
        """Tokens whose pages the prefix index owns; set when the lease is opened."""
        return self._cache_protected_len

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV is written, or will be by a launched forward; changed by `commit`."""
        return self._kv_committed_len

    @property
    def kv_allocated_len(self) -> int:
        """Tokens that the lease's pages were asked to hold; changed by `grow`."""
        return self._kv_allocated_len

    @property
    def num_pages(self) -> int:
        """Pages in the table, the locked prefix included."""
        return -(-self._kv_allocated_len // self.page_size)

    @property
    def num_protected_pages(self) -> int:
        """Pages at the table's start that the prefix index owns."""
        return self._cache_protected_len // self.page_size

    @property
    def own_pages(self) -> list[int]:
        """Pages that this lease owns: not those that the index lent it or has taken over."""
        table = self._page_table[self.num_protected_pages : self.num_pages].tolist()
        return [page for page in table if page not in self._published_pages]

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        """The page table in token order, a copy: the caller's own snapshot."""
        return self._page_table[: self.num_pages].copy()

    def close(self) -> None:
        """Decide the lease's end: from now on it cannot grow. Idempotent."""
        if self._state is LeaseState.OPEN:
            self._state = LeaseState.CLOSED

    def check_open(self, action: str) -> None:
        """Raise `LedgerError` unless the lease is open."""
        if self._state is not LeaseState.OPEN:
            raise LedgerError(f"{action} of {self.holder}: its lease is {self._state.name}")

    def __repr__(self) -> str:
        return (
            f"Lease({self.holder!r}, {self._state.name}, row={self.row}, "
            f"protected={self._cache_protected_len}, committed={self._kv_committed_len}, "
            f"allocated={self._kv_allocated_len})"
        )
