"""The sessions of one router: their histories, their turns, and the workers with their KV.

The router keeps the history; workers only cache its KV. So a worker that is lost, or needs its
memory, costs a computation, and never a session.

::

    open -> idle -- begin_turn --> running -- Turn.end --> idle ...   close, or long idle: gone
                                    |  ends well: prompt and output are the history
                                    |  fails, is aborted: the history is what it was
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import (
    InvalidField,
    SessionBusy,
    SessionExists,
    SessionsFull,
    UnknownSession,
)
from kvrelay.router.metrics import SESSION_ENDS, SESSION_TURNS, RouterMetrics
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.history_digest import digest_tokens, history_digest

MAX_SESSION_ID_BYTES: Final = 128
_EXPIRY_SECONDS: Final = 1.0
"""Seconds between two looks for sessions that have been idle for too long."""
_UNBOUNDED: Final = (1 << 32) - 1

Forget = Callable[[str, str], None]
"""A function that tells an incarnation's worker to keep nothing of the session of a name."""


@dataclass(eq=False, slots=True)
class Session:
    """One conversation of a client."""

    session_id: str
    owner: str
    """The name of the caller that owns it."""
    name: str
    """The session's name for workers; unique on the router."""
    cache_salt: str
    idle_timeout_seconds: float
    most_kept_tokens: int
    tokens: array[int]
    """The session's history, 4 bytes per token."""
    idle_since: float
    num_turns: int = 0
    """The number of turns that ended well."""
    busy: bool = False
    """Whether a turn runs, or is being admitted."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    """The turns that begin when those before them have ended."""
    worker: str = ""
    """The incarnation that generated the last turn; empty: none, or the worker was lost."""
    kept_tokens: int = 0
    """Tokens of the history that this worker is expected to have."""
    closed: bool = False
    last_turn: tuple[str, bytes, int] = ("", b"", 0)
    """The last turn that ended well: its request id and fingerprint, and its history's length."""
    counted_tokens: int = 0
    """Tokens counted for --max-session-tokens: the history, or a running turn's longer input."""
    history_digest: str = ""
    """The digest of the history; empty if the history is."""
    known_to: set[str] = field(default_factory=set)
    """The incarnations that may have a history of it, even if their stream has ended."""


class Turn:
    """One running turn of a session; it ends exactly once.

    Args:
        session: the turn's session, which is busy with it.
        history: tokens of the history before the turn's prompt.
        sessions: learns of its end.
        request: its request id and fingerprint.
    """

    def __init__(
        self,
        session: Session,
        history: Sequence[int],
        sessions: Sessions,
        request: tuple[str, bytes] = ("", b""),
    ) -> None:
        self.history = history
        self.request = request
        self.home = session.worker
        """The incarnation of the worker that may have its session's KV; empty: none has."""
        self._session = session
        self._sessions = sessions
        self._ended = False
        self._shared: int | None = None

    @property
    def name(self) -> str:
        """The session's name for workers."""
        return self._session.name

    @property
    def owner(self) -> str:
        """The name of the caller that owns the session."""
        return self._session.owner

    @property
    def cache_salt(self) -> str:
        """The cache salt of all turns of the session."""
        return self._session.cache_salt

    @property
    def most_kept_tokens(self) -> int:
        """The most tokens of a history whose KV is kept after the turn."""
        return self._session.most_kept_tokens

    @property
    def is_over(self) -> bool:
        """Whether the session is closed, so that the turn becomes part of no history."""
        return self._session.closed

    @property
    def is_first(self) -> bool:
        """Whether its prompt begins the conversation."""
        return not self.history

    def kept_on(self, incarnation: str, input_ids: Sequence[int]) -> int:
        """Tokens of the turn's prompt that a worker is expected to have for the session."""
        if not self.home or incarnation != self.home:
            return 0
        if self._shared is None:
            tokens = input_ids if isinstance(input_ids, array) else array("I", input_ids)
            self._shared = _count_shared(self._session.tokens, tokens, len(self.history))
        return min(self._shared, self._session.kept_tokens)

    def belongs_to(self, session: Session) -> bool:
        """Whether it is a turn of this very session."""
        return self._session is session

    def take_room(self, num_tokens: int) -> None:
        """Reserve room for its input as a history. Raises `SessionsFull` if there is none."""
        self._sessions.take_room(self._session, num_tokens)

    def end(self, tokens: Sequence[int] | None, worker: str, digest: str = "") -> None:
        """End the turn, so that the next one may begin. Later calls do nothing.

        Args:
            tokens: prompt and output, if it has ended well; None: the history stays as it was.
            worker: the incarnation that has generated last; empty: none has.
            digest: the digest of `tokens`; empty: it is computed here.
        """
        if not self._ended:
            self._ended = True
            self._sessions.end_turn(self._session, self, tokens, worker, digest)


class Sessions:
    """The sessions that clients have opened on this router. Use it on the event loop.

    Args:
        config: the bounds on their number, tokens and idle time.
        metrics: counts turns and ends.
        forget: tells workers to forget a session.
        clock: the time in seconds, monotonic.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        forget: Forget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._tell_to_forget = forget
        self._clock = clock
        self._sessions: dict[tuple[str, str], Session] = {}  # by owner and id
        self._by_name: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._num_tokens = 0
        self._num_by_owner: Counter[str] = Counter()  # sessions, for each that has some
        self._tokens_by_owner: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    # Calls from clients

    def open(self, caller: Caller, message: pb.OpenSessionRequest, vocab_size: int) -> Session:
        """Begin a session of the caller.

        Raises:
            InvalidField: names the field that cannot be served as it is.
            SessionExists: the caller has a session of this id.
            SessionsFull: the router, or this caller, has as many sessions or tokens as is allowed.
        """
        session_id = message.session_id or uuid.uuid4().hex
        self.check_open(caller, message, vocab_size, len(message.history.ids))
        longest = self._config.session_timeout
        asked = message.idle_timeout_seconds if message.HasField("idle_timeout_seconds") else None
        has_cap = message.HasField("max_kept_tokens")
        session = Session(
            session_id=session_id,
            owner=caller.name,
            name=str(next(self._numbers)),
            cache_salt=message.cache_salt,
            idle_timeout_seconds=longest if asked is None else min(asked, longest),
            most_kept_tokens=message.max_kept_tokens if has_cap else _UNBOUNDED,
            tokens=array("I", message.history.ids),
            idle_since=self._clock(),
        )
        session.history_digest = message.history_digest or history_digest(session.tokens)
        self._sessions[caller.name, session_id] = self._by_name[session.name] = session
        self._num_by_owner[caller.name] += 1
        self._count(session, len(session.tokens))
        return session

    def check_open(
        self, caller: Caller, message: pb.OpenSessionRequest, vocab_size: int, tokens: int
    ) -> None:
        """Raise what `open` would raise with a history of `tokens` tokens."""
        self._check_fields(message, vocab_size)
        if message.session_id and (caller.name, message.session_id) in self._sessions:
            raise SessionExists(message.session_id)
        self._check_number(caller.name)
        self._check_tokens(caller.name, max(tokens, 1))

    def close(self, caller: Caller, session_id: str) -> None:
        """End a session of the caller; a running turn goes on to its end.

        Raises:
            UnknownSession: the caller has no session of this id.
        """
        self._remove(self._find(caller, session_id), "closed")

    def of(self, caller: Caller) -> list[Session]:
        """The caller's sessions, the oldest first."""
        return [one for one in self._sessions.values() if one.owner == caller.name]

    def find_history(self, caller: Caller, digest: str) -> array[int] | None:
        """Find the history with this digest among the caller's sessions; None: none has it."""
        tokens = digest_tokens(digest)
        for one in self.of(caller):
            if len(one.tokens) == tokens and one.history_digest == digest:
                return one.tokens
        return None

    def idle_seconds(self, session: Session) -> float:
        """Seconds since the session's last turn ended; 0 while one runs."""
        return 0.0 if session.busy else self._clock() - session.idle_since

    def check_turn(self, message: pb.GenerateRequest) -> None:
        """Raise `InvalidField` for fields that a turn cannot have, or that only a turn can have."""
        if not message.session_id:
            for name in ("rewind_to", "queue_turn"):
                is_set = message.HasField(name) if name == "rewind_to" else message.queue_turn
                if is_set:
                    raise InvalidField(name, "is allowed with session_id alone")
            return
        if message.sampling_params.n > 1:
            raise InvalidField("n", f"must be 1 in a session, got {message.sampling_params.n}")
        if message.cache_salt:
            raise InvalidField("cache_salt", "must be given to OpenSession, for all turns")

    async def begin_turn(
        self, caller: Caller, message: pb.GenerateRequest, fingerprint: bytes
    ) -> Turn:
        """Begin the next turn of a session, once it may begin; the caller must end it.

        A repetition of the last turn, by its request id and body, replaces that turn. Its client
        has not received the end, and gets the same tokens.

        Raises:
            InvalidField: `rewind_to` is beyond the history.
            UnknownSession: the caller has no session of this id, or it was closed meanwhile.
            SessionBusy: another turn runs, and this one is not to wait.
        """
        session = self._find(caller, message.session_id)
        if session.busy:
            if not message.queue_turn:
                raise SessionBusy(session.session_id)
            await self._wait(session)
        session.busy = True
        try:
            if session.closed:
                raise UnknownSession(session.session_id)
            request = (message.request_id, fingerprint)
            return Turn(session, self._history(session, message, request), self, request)
        except BaseException:
            self._pass_on(session)
            raise

    def begin_if_free(self, caller: Caller, session_id: str) -> Turn | None:
        """Begin a turn that brings the whole conversation, if the session exists and is not busy.

        None: it is to be served as a request without a session.
        """
        session = self._sessions.get((caller.name, session_id))
        if session is None or session.busy:
            return None
        session.busy = True
        return Turn(session, (), self)

    def cache_salt_of(self, caller: Caller, session_id: str) -> str:
        """The cache salt of the caller's session; empty if there is no such session."""
        session = self._sessions.get((caller.name, session_id))
        return "" if session is None else session.cache_salt

    def has_replaced(self, caller: Caller, session_id: str, turn: Turn | None) -> bool:
        """Whether the caller has closed the session of a turn, and opened another of this id."""
        session = self._sessions.get((caller.name, session_id))
        return session is not None and turn is not None and not turn.belongs_to(session)

    # Turns and workers

    def take_room(self, session: Session, num_tokens: int) -> None:
        """Reserve room for a turn's tokens, the history included; see `Turn.take_room`.

        A turn that is not longer than the former history always has room.
        """
        more = num_tokens - session.counted_tokens
        if more > 0 and not session.closed:
            self._check_tokens(session.owner, more)
            self._count(session, num_tokens)

    def end_turn(
        self,
        session: Session,
        turn: Turn,
        tokens: Sequence[int] | None,
        worker: str,
        digest: str = "",
    ) -> None:
        """End a turn; only `Turn.end` calls this."""
        self._metrics.count(SESSION_TURNS, outcome="failed" if tokens is None else "completed")
        if worker:
            session.known_to.add(worker)
        if session.closed:
            self._forget(session)
        elif tokens is not None:
            session.tokens = tokens if isinstance(tokens, array) else array("I", tokens)
            session.history_digest = digest or history_digest(session.tokens)
            session.num_turns += 1
            session.last_turn = (*turn.request, len(turn.history))
            session.worker = worker
            self._forget(session, but=worker)
            kept = len(tokens) - 1
            session.kept_tokens = kept if kept <= session.most_kept_tokens else 0
        elif worker != session.worker:
            self._forget(session, but=session.worker)  # it may have finished what was given up
        if not session.closed:
            self._count(session, len(session.tokens))
        self._pass_on(session)

    def worker_gave_up(self, incarnation: str, names: Sequence[str]) -> None:
        """Note that a worker has no KV of these sessions any more."""
        for name in names:
            session = self._by_name.get(name)
            if session is not None and session.worker == incarnation:
                session.kept_tokens = 0

    def worker_lost(self, incarnation: str) -> None:
        """Note that the stream to a worker has ended, and with it all that it kept."""
        for session in self._sessions.values():
            if session.worker == incarnation:
                session.worker, session.kept_tokens = "", 0

    def expire(self) -> None:
        """End the sessions that had no turn for their idle timeout."""
        now = self._clock()
        for session in list(self._sessions.values()):
            if not session.busy and now - session.idle_since >= session.idle_timeout_seconds:
                self._remove(session, "expired")

    async def run(self) -> None:
        """Let sessions expire, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            self.expire()

    # Inside

    def _find(self, caller: Caller, session_id: str) -> Session:
        session = self._sessions.get((caller.name, session_id))
        if session is None:
            raise UnknownSession(session_id)
        return session

    def _check_fields(self, message: pb.OpenSessionRequest, vocab_size: int) -> None:
        for name, text in (("session_id", message.session_id), ("cache_salt", message.cache_salt)):
            if len(text.encode()) > MAX_SESSION_ID_BYTES:
                raise InvalidField(name, f"must have at most {MAX_SESSION_ID_BYTES} bytes")
        if message.HasField("idle_timeout_seconds") and not message.idle_timeout_seconds > 0:
            raise InvalidField("idle_timeout_seconds", "must be above 0")
        if max(message.history.ids, default=0) >= vocab_size:
            raise InvalidField("history", f"has a token id that is not below {vocab_size}")

    def _check_number(self, owner: str) -> None:
        most, number, mine = self._config.max_sessions, len(self), self._num_by_owner[owner]
        if number >= most:
            self._refuse(f"{number} sessions are open (--max-sessions)")
        if mine >= self._share_of(owner, most):
            self._refuse(f"{mine} sessions of this token are open (--max-session-share)")

    def _check_tokens(self, owner: str, more: int) -> None:
        most, mine = self._config.max_session_tokens, self._tokens_by_owner[owner]
        if self._num_tokens + more > most:
            held = f"the histories of all sessions have {self._num_tokens} tokens"
            self._refuse(f"{held} (--max-session-tokens)")
        if mine + more > self._share_of(owner, most):
            held = f"the histories of this token's sessions have {mine} tokens"
            self._refuse(f"{held} (--max-session-share)")

    def _share_of(self, owner: str, most: int) -> int:
        """The share of `most` for one caller; all of it, if the router asks for no tokens."""
        return max(int(most * self._config.max_session_share), min(most, 1)) if owner else most

    def _refuse(self, held: str) -> NoReturn:
        raise SessionsFull(held, self._config.retry_after_ms)

    def _count(self, session: Session, num_tokens: int) -> None:
        more = num_tokens - session.counted_tokens
        self._num_tokens += more
        self._tokens_by_owner[session.owner] += more
        session.counted_tokens = num_tokens

    def _history(
        self, session: Session, message: pb.GenerateRequest, request: tuple[str, bytes]
    ) -> Sequence[int]:
        *last_request, before = session.last_turn
        if message.request_id and tuple(last_request) == request:
            return session.tokens[:before]
        if not message.HasField("rewind_to"):
            return session.tokens
        if message.rewind_to > len(session.tokens):
            has = len(session.tokens)
            raise InvalidField(
                "rewind_to", f"the history has {has} tokens, not {message.rewind_to}"
            )
        return session.tokens[: message.rewind_to]

    async def _wait(self, session: Session) -> None:
        """Wait until the earlier turns have ended; then the session is busy with the caller's."""
        turn = asyncio.get_running_loop().create_future()
        session.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on(session)  # this turn had begun already
            elif turn in session.waiting:
                session.waiting.remove(turn)
            raise

    def _pass_on(self, session: Session) -> None:
        """Let the next waiting turn begin; the session is idle if none waits."""
        while session.waiting:
            turn = session.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        session.busy, session.idle_since = False, self._clock()

    def _remove(self, session: Session, why: str) -> None:
        del self._sessions[session.owner, session.session_id]
        del self._by_name[session.name]
        self._count(session, 0)
        self._num_by_owner[session.owner] -= 1
        if not self._num_by_owner[session.owner]:
            del self._num_by_owner[session.owner], self._tokens_by_owner[session.owner]
        session.closed = True
        self._metrics.count(SESSION_ENDS, reason=why)
        self._forget(session)
        while session.waiting:
            turn = session.waiting.popleft()
            if not turn.done():
                turn.set_exception(UnknownSession(session.session_id))

    def _forget(self, session: Session, but: str = "") -> None:
        """Let all workers but this one forget what they may have of a session."""
        for worker in sorted(session.known_to - {but}):
            self._tell_to_forget(worker, session.name)
        session.known_to &= {but}


def _count_shared(one: array[int], other: array[int], at_least: int) -> int:
    """Count the equal elements at the start of both; the first `at_least` are known to be equal.

    It compares slices, which takes a hundredth of a loop's time.
    """
    low, high = at_least, min(len(one), len(other))
    if one[low:high] == other[low:high]:
        return high
    while high - low > 1:  # both differ within [low, high), and not before
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
