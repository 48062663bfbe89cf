"""Sessions: memory that a conversation keeps between its turns.

::

    (none) -- save --> IDLE -- borrow --> LENT -- save, or roll_back --> IDLE
                        |                  | \\-- forget: the turn's memory is gone -> (none)
                        |                  |
                      close, expire      close --> CLOSING -- save, roll_back or forget --> (none)

A lent session's memory is its turn's, and is counted there once. Whatever ends
a session releases its lease, through `release_kv_cache` like everything else:
what was written goes to the prefix index, where the next turn may still find it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.mem_cache.account import NO_PAGE
from kvrelay.mem_cache.errors import KVCacheError
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.kv_cache_manager import NO_TOKENS, KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.release import Outcome, release_kv_cache


@dataclass(slots=True)
class _Session:
    """The memory of one conversation."""

    lease: Lease
    fences: tuple[Fence, ...]
    """The fences of the last turn, which may still read or write it."""
    idle_since: float
    token_ids: TokenIds
    """The tokens whose KV is written."""
    prefix_len: int = 0
    """The tokens that its running turn began with."""
    closing: bool = False
    owner: str = ""
    """The owner of the session: see `SessionMemory.evict_oldest`."""

    @property
    def lent(self) -> bool:
        return self.lease.state is not LeaseState.SAVED


class SessionMemory:
    """The sessions of one worker. Only the engine thread may call it.

    Misuse (a session that is unknown, or lent already) raises `KVCacheError`.

    Args:
        kv_cache: has their memory.
        clock: seconds, monotonic; measures how long sessions are idle.
    """

    def __init__(
        self, kv_cache: KVCacheManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kv_cache = kv_cache
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self.locked_pages = 0
        """The number of the index's pages, of the first pool, that idle sessions lock."""
        self._locks = np.zeros(kv_cache.audit.page_counts()[0].total, np.int32)
        """The number of idle sessions that lock each page of the first pool."""

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def token_ids(self, session_id: str) -> TokenIds | None:
        """Get the tokens whose KV an idle session has; None: it is lent, or not known."""
        session = self._sessions.get(session_id)
        return None if session is None or session.lent else session.token_ids

    def can_go_back(self, session_id: str, prefix_len: int) -> bool:
        """Whether an idle session can be lent with its first `prefix_len` tokens."""
        lease = self._idle(session_id).lease
        return 0 < prefix_len <= lease.kv_committed_len and lease.can_go_back(prefix_len)

    def save(
        self,
        session_id: str,
        lease: Lease,
        fences: Iterable[Fence] = (),
        token_ids: TokenIds = NO_TOKENS,
        owner: str = "",
    ) -> Outcome:
        """Give the lease of a turn that ended well to its session. Makes the session if it is new.

        Args:
            session_id: any string.
            lease: open; of the turn.
            fences: what may still read or write its pages.
            token_ids: the tokens whose KV is written.
            owner: of the session.

        Returns:
            How the turn's memory was released: it was saved.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.lease is not lease:
            raise KVCacheError(f"session {session_id}: {lease!r} is not what was lent")
        before = () if session is None else session.fences
        pending = tuple(fence for fence in (*before, *fences) if not fence.passed())
        release_kv_cache(self._kv_cache, lease, Outcome.SAVED, fences=pending)
        closing = session is not None and session.closing
        self._sessions[session_id] = _Session(lease, pending, self._clock(), token_ids, owner=owner)
        self._note_locks(lease, 1)
        if closing:
            self._release(session_id)
        return Outcome.SAVED

    def borrow(
        self,
        session_id: str,
        holder: str,
        prefix_len: int,
        promised_tokens: int,
        *,
        fresh_boundary: bool = False,
        headroom: Sequence[int] | None = None,
    ) -> Lease | None:
        """Lend the session's lease to its next turn. Returns `None` if memory is short: try again.

        `SessionLeases.borrow` describes the fate of the pages.
        """
        session = self._idle(session_id)
        lent = self._kv_cache.sessions.borrow(
            session.lease,
            holder,
            prefix_len,
            promised_tokens,
            fresh_boundary=fresh_boundary,
            pending=[fence for fence in session.fences if not fence.passed()],
            headroom=headroom,
        )
        if not lent:
            return None
        self._note_locks(session.lease, -1)
        session.prefix_len = prefix_len
        return session.lease

    def roll_back(self, session_id: str, fences: Iterable[Fence] = ()) -> bool:
        """Restore the session, after a failed turn, to what it was when the turn began.

        Returns `False` if a window has moved on or the turn has published. Then its memory is
        released, and the next turn begins without.
        """
        session = self._lent(session_id)
        fences = tuple(fences)
        if not session.lease.can_go_back(session.prefix_len):
            self.forget(session_id, fences)
            return False
        pending = [fence for fence in (*session.fences, *fences) if not fence.passed()]
        self._kv_cache.sessions.roll_back(session.lease, session.prefix_len, pending)
        kept = session.token_ids[: session.prefix_len]
        self.save(session_id, session.lease, pending, kept, session.owner)
        return True

    def forget(self, session_id: str, fences: Iterable[Fence] = ()) -> None:
        """Release the memory of an aborted turn, so that the next one begins without any.

        It is done here, because only the session knows which fences the previous turn left.
        """
        session = self._lent(session_id)
        del self._sessions[session_id]
        fences = (*session.fences, *fences)
        release_kv_cache(self._kv_cache, session.lease, Outcome.ABORTED, fences=fences)

    def close(self, session_id: str) -> None:
        """End a session: now, or when its running turn has ended."""
        session = self._sessions.get(session_id)
        if session is None:
            raise KVCacheError(f"session {session_id} is not known")
        if session.lent:
            session.closing = True
        else:
            self._release(session_id)

    def expire(self, idle_seconds: float) -> list[str]:
        """End the sessions that have been idle for `idle_seconds`. Returns their ids."""
        limit = self._clock() - idle_seconds
        expired = [name for name, one in self._sessions.items() if self._is_idle_since(one, limit)]
        for name in expired:
            self._release(name)
        return expired

    def evict_oldest(self, last: str = "") -> str | None:
        """End the session that has been idle the longest, to make room; never one that is lent.

        First come sessions of owners above their share: they keep more idle tokens than an equal
        part of all. Session `last` comes after all others.
        """
        idle = {name: one for name, one in self._sessions.items() if not one.lent}
        if not idle:
            return None
        kept: Counter[str] = Counter()
        for one in idle.values():
            kept[one.owner] += one.lease.kv_committed_len
        share = kept.total() / len(kept)

        def order(name: str) -> tuple[bool, bool, float, str]:
            one = idle[name]
            return (name == last, kept[one.owner] <= share, one.idle_since, name)

        name = min(idle, key=order)
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

    def _note_locks(self, lease: Lease, change: int) -> None:
        """Note that a lease has become idle (1), or is no longer idle (-1)."""
        pages = lease.pages()[: lease.num_protected_pages]
        pages = pages[pages != NO_PAGE]
        before = np.count_nonzero(self._locks[pages])
        self._locks[pages] += change
        self.locked_pages += int(np.count_nonzero(self._locks[pages]) - before)

    @staticmethod
    def _is_idle_since(session: _Session, limit: float) -> bool:
        return not session.lent and session.idle_since <= limit

    def _idle(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.lent:
            what = "is not known" if session is None else "is lent to a turn"
            raise KVCacheError(f"session {session_id} {what}")
        return session

    def _lent(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or not session.lent:
            what = "is not known" if session is None else "is not lent"
            raise KVCacheError(f"session {session_id} {what}")
        return session

    def _release(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._note_locks(session.lease, -1)
        release_kv_cache(
            self._kv_cache,
            session.lease,
            Outcome.FINISHED,
            token_ids=session.token_ids,
            fences=session.fences,
        )
