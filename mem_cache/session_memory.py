"""Sessions: memory that a conversation keeps between its turns.

::

    (none) -- keep --> IDLE -- borrow --> LENT -- keep, or roll_back --> IDLE
                        |                  | \\-- forget: the turn's memory is gone -> (none)
                        |                  |
                   close, evict          close --> CLOSING -- keep, roll_back or forget --> (none)

A lent session's memory is its turn's, and is counted there once. At a turn's end, `keep`,
`roll_back` and `forget` say how `release_kv_cache` has to release the turn's lease: `SAVED` leaves
it to the session. An idle session's lease is released here, and what was written goes to the prefix
index, where the next turn may still find it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fair_shares import FairShares
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.kv_cache_manager import NO_TOKENS, KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.release import Outcome, release_kv_cache

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True)
class _Session:
    """The memory of one conversation."""

    lease: Lease
    owner: str
    token_ids: TokenIds
    """The tokens whose KV is written."""
    prefix_len: int = 0
    """The tokens that its running turn began with."""
    closing: bool = False

    @property
    def lent(self) -> bool:
        return self.lease.state is not LeaseState.SAVED


class SessionMemory(Generic[KeyT]):
    """The sessions of one worker, by their names. Only the engine thread may call it.

    Misuse (a session that is unknown, or lent already) raises `KVCacheError`.

    Args:
        kv_cache: has their memory.
    """

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._sessions: dict[KeyT, _Session] = {}
        self._idle_tokens: FairShares[KeyT] = FairShares()
        self.locked_pages = 0
        """The number of the index's pages, of the first pool, that idle sessions lock."""
        self._locks = np.zeros(kv_cache.shape.pools[0].total_pages, np.int32)
        """The number of idle sessions that lock each page of the first pool."""

    def __contains__(self, name: KeyT) -> bool:
        return name in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(list(self._sessions))

    def token_ids(self, name: KeyT) -> TokenIds | None:
        """Get the tokens whose KV an idle session has; None: it is lent, or not known."""
        session = self._sessions.get(name)
        return None if session is None or session.lent else session.token_ids

    def can_go_back(self, name: KeyT, prefix_len: int) -> bool:
        """Whether an idle session can be lent with its first `prefix_len` tokens."""
        lease = self._idle(name).lease
        return 0 < prefix_len <= lease.kv_committed_len and lease.can_go_back(prefix_len)

    # A turn begins

    def borrow(
        self,
        name: KeyT,
        holder: str,
        prefix_len: int,
        promised_tokens: int,
        *,
        fresh_boundary: bool = False,
        headroom: Sequence[int] | None = None,
    ) -> Lease | None:
        """Lend the session's lease to its next turn. Returns `None` if memory is short: try again.

        `LeaseTable.borrow` describes the fate of the pages.
        """
        session = self._idle(name)
        lent = self._kv_cache.leases.borrow(
            session.lease,
            holder,
            prefix_len,
            promised_tokens,
            fresh_boundary=fresh_boundary,
            headroom=headroom,
        )
        if not lent:
            return None
        self._idle_tokens.remove(name)
        self._note_locks(session.lease, -1)
        session.prefix_len = prefix_len
        return session.lease

    def is_closing(self, name: KeyT) -> bool:
        """Whether a lent session was closed, and is gone when its turn ends."""
        session = self._sessions.get(name)
        return session is not None and session.closing

    # A turn ends. Each returns how the caller has to release the turn's lease

    def keep(
        self, name: KeyT, lease: Lease, token_ids: TokenIds = NO_TOKENS, owner: str = ""
    ) -> Outcome:
        """Keep the lease of a turn that ended well. Makes the session if it is new.

        Args:
            name: of the session.
            lease: open; of the turn.
            token_ids: the tokens whose KV is written.
            owner: of the session, for its share of all idle tokens.

        Returns:
            `SAVED`; `FINISHED` if the session was closed meanwhile, and is gone.
        """
        session = self._sessions.get(name)
        if session is not None and session.lease is not lease:
            raise KVCacheError(f"session {name}: {lease!r} is not what was lent")
        if session is not None and session.closing:
            del self._sessions[name]
            return Outcome.FINISHED
        self._sessions[name] = _Session(lease, owner, token_ids)
        self._idle_tokens.add(name, owner, lease.kv_committed_len)
        self._note_locks(lease, 1)
        return Outcome.SAVED

    def roll_back(self, name: KeyT, fences: Sequence[Fence] = ()) -> Outcome:
        """Restore the session, after a failed turn, to what it was when the turn began.

        Args:
            name: of the session, which is lent.
            fences: what may still read or write the turn's pages.

        Returns:
            See `keep`; `ABORTED` if a window has moved on or the turn has published. Then the
            session is gone, and the next turn begins without.
        """
        session = self._lent(name)
        lease, prefix_len = session.lease, session.prefix_len
        if not lease.can_go_back(prefix_len):
            return self.forget(name)
        self._kv_cache.leases.roll_back(lease, prefix_len, fences)
        return self.keep(name, lease, session.token_ids[:prefix_len], session.owner)

    def forget(self, name: KeyT) -> Outcome:
        """Forget a lent session, so that its next turn begins without any memory."""
        self._lent(name)
        del self._sessions[name]
        return Outcome.ABORTED

    # A session ends

    def close(self, name: KeyT) -> None:
        """End a session: now, or when its running turn has ended."""
        session = self._sessions.get(name)
        if session is None:
            raise KVCacheError(f"session {name} is not known")
        if session.lent:
            session.closing = True
        else:
            self._release(name)

    def evict_oldest(self, last: KeyT | None = None) -> KeyT | None:
        """End the session that has been idle the longest, to make room; never one that is lent.

        First come sessions of owners above their share: they keep more idle tokens than an equal
        part of all. Session `last` comes after all others.
        """
        name = self._idle_tokens.first_to_go(last)
        if name is not None:
            self._release(name)
        return name

    def count_reclaimable(self) -> list[int]:
        """Count for each pool the pages that come back if all idle sessions end."""
        audit = self._kv_cache.audit
        return [
            int(
                np.count_nonzero(
                    audit.pages_in_tables(pool, idle=True)
                    & ~audit.pages_in_tables(pool, idle=False)
                )
            )
            for pool in self._kv_cache.shape.pool_numbers
        ]

    # Inside

    def _note_locks(self, lease: Lease, change: int) -> None:
        """Note that a lease has become idle (1), or is no longer idle (-1)."""
        pages = lease.pages()[: lease.num_protected_pages]
        pages = pages[pages != NO_PAGE]
        before = np.count_nonzero(self._locks[pages])
        self._locks[pages] += change
        self.locked_pages += int(np.count_nonzero(self._locks[pages]) - before)

    def _idle(self, name: KeyT) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.lent:
            what = "is not known" if session is None else "is lent to a turn"
            raise KVCacheError(f"session {name} {what}")
        return session

    def _lent(self, name: KeyT) -> _Session:
        session = self._sessions.get(name)
        if session is None or not session.lent:
            what = "is not known" if session is None else "is not lent"
            raise KVCacheError(f"session {name} {what}")
        return session

    def _release(self, name: KeyT) -> None:
        session = self._sessions.pop(name)
        self._idle_tokens.remove(name)
        self._note_locks(session.lease, -1)
        release_kv_cache(
            self._kv_cache, session.lease, Outcome.FINISHED, token_ids=session.token_ids
        )
