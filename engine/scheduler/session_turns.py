"""The KV of sessions, kept between their turns and lent to the next one.

A session here is a cache: its router has the tokens of its history, and a turn brings all of them.
The turn borrows the tokens that its input and the session have in common. So a turn that goes back,
or one that the router has forgotten, needs no special case.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.history_store import HistoryStore
from kvrelay.engine.scheduler.metrics import SESSION_ENDS, SESSION_TURNS, WorkerMetrics
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.account import NO_PAGE
from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.release import Outcome
from kvrelay.mem_cache.session_memory import SessionMemory

SessionName = tuple[RouterLink, str]
"""A router's stream, and the router's name for a session."""


class SessionEnd(StrEnum):
    """The reason why a session's KV was given up: a metric's label."""

    FORGOTTEN = "forgotten"
    """The router ended it, or the router's stream ended."""
    ROOM = "room"
    """Other requests needed the memory, or a row."""
    UNUSABLE = "unusable"
    """Its next turn has too little in common with it, or computes all of its input."""
    FAILED = "failed"
    """A forward of its turn has failed."""
    ROLL_BACK = "roll_back"
    """A window had moved on when its turn was to be undone."""
    TOO_LONG = "too_long"
    """It has more tokens than are kept of a session."""
    ADOPTED = "adopted"
    """Another router goes on with it."""


class SessionTurns:
    """The sessions of one worker, by their routers' streams. Only the engine thread uses it.

    Args:
        kv_cache: has their memory.
        metrics: counts turns and ends.
    """

    def __init__(self, kv_cache: KVCacheManager, metrics: WorkerMetrics) -> None:
        self._kv_cache = kv_cache
        self._metrics = metrics
        self._sessions: SessionMemory[SessionName] = SessionMemory(kv_cache)
        self._ended: dict[RouterLink, list[str]] = {}
        most_tokens = kv_cache.audit.page_counts()[0].total * kv_cache.shape.page_size
        self._histories = HistoryStore(most_tokens)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def locked_tokens(self) -> int:
        """Tokens of cached prefixes that idle sessions lock."""
        return self._sessions.locked_pages * self._kv_cache.shape.page_size

    def has_kv_of(self, request: Request) -> bool:
        """Whether the request's session has KV here that may be lent to it."""
        name = _name_of(request)
        return name is not None and self._sessions.token_ids(name) is not None

    def take_ended(self, link: RouterLink) -> tuple[str, ...]:
        """Take the router's sessions whose KV was given up unasked since the last call."""
        return tuple(self._ended.pop(link, ()))

    # A turn begins

    def open(
        self,
        request: Request,
        known_tokens: int,
        headroom: Sequence[int] | None,
        *,
        fresh_boundary: bool,
    ) -> Lease | None:
        """Open a lease for a request's whole input. Returns `None` if memory is short.

        The lease is that of its session, if that can be used, else a new one. If ending idle
        sessions makes room, they end in the order of `SessionMemory.evict_oldest`, the request's
        own last.

        Args:
            request: has no lease.
            known_tokens: tokens of its input that need not be computed if they are here.
            headroom: pages of each pool that must stay free for others.
            fresh_boundary: see `LeaseTable.borrow`.
        """
        own = self._usable(request, known_tokens, is_read=fresh_boundary)
        lease = self._lend_or_open(request, own, known_tokens, headroom, fresh=fresh_boundary)
        if lease is not None or not len(self._sessions):
            return lease
        if not self.fits_without_sessions(request, known_tokens, headroom):
            return None
        while lease is None and self.evict_oldest(last=own):
            own = own if own is not None and own in self._sessions else None
            lease = self._lend_or_open(request, own, known_tokens, headroom, fresh=fresh_boundary)
        return lease

    def _usable(self, request: Request, known_tokens: int, *, is_read: bool) -> SessionName | None:
        """Find the idle session that a request can go on with; None: there is none.

        A session that it cannot go on with ends here; the index has what was written. So does a
        session with a window if the turn is read from a peer. The window moves on before the first
        read, and the previous turn's last forward may still write to the pages that it leaves.
        """
        name = _name_of(request)
        if name is None or self._sessions.token_ids(name) is None:
            return None
        shared = self._shared_len(name, request.input_ids[:known_tokens])
        moves_on = is_read and any(self._kv_cache.shape.windowed)
        if not moves_on and self._sessions.can_go_back(name, shared):
            return name
        self._sessions.close(name)
        self._count_end(name, SessionEnd.UNUSABLE)
        return None

    def _shared_len(self, name: SessionName, input_ids: TokenIds) -> int:
        """Count the tokens that an input and an idle session have in common at their beginning."""
        kept = self._sessions.token_ids(name)
        assert kept is not None
        both = min(len(kept), len(input_ids))
        differs = kept[:both] != input_ids[:both]
        return int(differs.argmax()) if differs.any() else both

    def _lend_or_open(
        self,
        request: Request,
        own: SessionName | None,
        known_tokens: int,
        headroom: Sequence[int] | None,
        *,
        fresh: bool,
    ) -> Lease | None:
        holder, length = str(request.key), request.input_len
        known = request.input_ids[:known_tokens]
        if own is None:
            lease = self._kv_cache.open(
                holder, length, token_ids=known, namespace=request.namespace, headroom=headroom
            )
            if lease is not None and request.session is not None:
                self._metrics.count(SESSION_TURNS, start="opened")
            return lease
        shared = self._shared_len(own, known)
        lease = self._sessions.borrow(
            own, holder, shared, length, fresh_boundary=fresh, headroom=headroom
        )
        if lease is not None:
            request.borrowed_len = shared
            self._metrics.count(SESSION_TURNS, start="resumed")
        return lease

    def fits_without_sessions(
        self, request: Request, known_tokens: int, headroom: Sequence[int] | None
    ) -> bool:
        """Whether a request would fit if all idle sessions ended.

        Pages of its input that other requests lock need no room.
        """
        kv_cache = self._kv_cache
        spare = headroom or [0] * len(kv_cache.shape.pools)
        found = kv_cache.find_cached(request.input_ids[:known_tokens], request.namespace)
        needed = []
        for pool, pages in enumerate(found):
            locked = kv_cache.audit.pages_in_tables(pool, idle=False)
            shared = int(np.count_nonzero(locked[pages[pages != NO_PAGE]]))
            most = kv_cache.shape.most_pages(pool, request.input_len)
            needed.append(max(most - shared, 0) + spare[pool])
        return self.can_make_room(needed)

    def can_make_room(self, pages: Sequence[int], rows: int = 0) -> bool:
        """Whether `pages` of each pool, and `rows`, would be free if all idle sessions ended."""
        audit, reclaimable = self._kv_cache.audit, self._sessions.count_reclaimable()
        has_rows = audit.row_counts()
        if has_rows.free + has_rows.session < rows:
            return False
        return all(
            counts.free + counts.cached_evictable - counts.promised + reclaimable[pool]
            >= pages[pool]
            for pool, counts in enumerate(audit.page_counts())
        )

    # A turn ends

    def end_turn(
        self, request: Request, outcome: Outcome, token_ids: TokenIds, fences: Sequence[Fence]
    ) -> Outcome:
        """Decide how `release_kv_cache` has to release a request's lease.

        A turn that ended well leaves the session with all of its tokens. One that was retracted or
        aborted leaves the session as it was before. A forward that failed ends the session.

        Args:
            request: has a lease.
            outcome: of the request.
            token_ids: those whose KV is written.
            fences: what may still read or write its pages.
        """
        name = _name_of(request)
        ends_well = outcome is Outcome.FINISHED and len(token_ids) > 0
        if name is None or not (request.borrowed_len or ends_well):
            return outcome
        if not request.borrowed_len and name in self._sessions:
            return outcome  # another turn has it: this one was given up by its router
        if ends_well:
            return self._keep(request, name, token_ids)
        if outcome is Outcome.FAILED:
            self._sessions.forget(name)
            self._count_end(name, SessionEnd.FAILED)
            return outcome  # what the turn has published may be wrong, too
        released = self._sessions.roll_back(name, fences)
        if released is not Outcome.SAVED:
            is_closed = released is Outcome.FINISHED
            self._count_end(name, SessionEnd.FORGOTTEN if is_closed else SessionEnd.ROLL_BACK)
        return released

    def _keep(self, request: Request, name: SessionName, token_ids: TokenIds) -> Outcome:
        """Keep a turn's memory and history, as far as its session is to go on."""
        session, lease = request.session, request.held
        assert session is not None
        request.enter(Phase.SAVING)
        # Accepted drafts of its last step are written, and were not committed.
        self._kv_cache.commit(lease, max(len(token_ids), lease.kv_committed_len))
        is_closed = self._sessions.is_closing(name)
        if not is_closed:
            history = array("I", token_ids.tobytes())
            history.extend(request.token_ids(len(token_ids), request.num_tokens))
            self._histories.put((request.link.router, session.session), session.owner, history)
            self._metrics.history_tokens = self._histories.room_tokens
        if not is_closed and len(token_ids) <= session.most_kept_tokens:
            return self._sessions.keep(name, lease, token_ids, session.owner)
        if name in self._sessions:
            self._sessions.forget(name)
        self._count_end(name, SessionEnd.FORGOTTEN if is_closed else SessionEnd.TOO_LONG)
        return Outcome.FINISHED

    # A session ends

    def evict_oldest(self, last: SessionName | None = None) -> bool:
        """End the session that has been idle the longest, but `last` after all others.

        Returns:
            Whether there was one. Its pages are free, or the index may evict them, unless something
            still reads or writes them.
        """
        name = self._sessions.evict_oldest(last)
        if name is None:
            return False
        self._count_end(name, SessionEnd.ROOM)
        return True

    def end(self, link: RouterLink, name: str) -> None:
        """End a router's session, now or with its turn; does nothing if there is none."""
        self._histories.forget((link.router, name))
        self._metrics.history_tokens = self._histories.room_tokens
        self._close((link, name))

    def adopt(self, owner: str, digest: str) -> array[int] | None:
        """Find the history with this digest for another router. Returns None if it is not here.

        If its session's KV is here and idle, it goes to the prefix index. The next turn finds it
        there, whichever router it comes from.

        Args:
            owner: the owner that the history must have.
            digest: of the history.
        """
        found = self._histories.find(owner, digest)
        if found is None:
            return None
        (router, name), history = found
        for session in self._sessions:
            is_it = (session[0].router, session[1]) == (router, name)
            if is_it and self._sessions.token_ids(session) is not None:
                self._sessions.close(session)
                self._count_end(session, SessionEnd.ADOPTED)
        return history

    def end_all(self, link: RouterLink | None = None) -> None:
        """End all sessions, or those of one router, whose histories another router may adopt."""
        for name in self._sessions:
            if link is None or name[0] is link:
                self._close(name)
        if link is not None:
            self._ended.pop(link, None)

    def _close(self, name: SessionName) -> None:
        """End a session because its router does: now, or with its turn."""
        if name in self._sessions:
            self._sessions.close(name)
            if name not in self._sessions:
                self._count_end(name, SessionEnd.FORGOTTEN)

    def _count_end(self, name: SessionName, why: SessionEnd) -> None:
        """Note that a session has no memory any more, and report it to its router."""
        self._metrics.count(SESSION_ENDS, reason=why.value)
        if why is not SessionEnd.FORGOTTEN:
            link, own_name = name
            self._ended.setdefault(link, []).append(own_name)


def _name_of(request: Request) -> SessionName | None:
    return None if request.session is None else (request.link, request.session.session)
