"""The commands that other threads send to the engine thread, and the inbox they arrive in."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from kvrelay.engine.scheduler.attempt_trace import AttemptTrace
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.wire.submit import (
    CancelRequest,
    ForgetSessionRequest,
    RequestKey,
    SubmitRequest,
    TellPrefixesRequest,
    WatchRequests,
)


class Dropped(StrEnum):
    """Kinds of messages that were dropped: late, duplicate or meant for another worker."""

    SUBMIT = "submit"
    """A submission that came twice."""
    CANCEL = "cancel"
    """A cancellation of a request that has ended, or never came."""
    HAND_OVER = "hand_over"
    """A hand-over message of a request that has ended here."""
    DUPLICATE = "duplicate"
    """A hand-over message, or the end of a read, that came twice."""
    STREAM = "stream"
    """A second hand-over stream for one request."""
    INCARNATION = "incarnation"
    """A call that was meant for another incarnation of this worker."""


@dataclass(frozen=True, slots=True)
class Misdirected:
    """A call that was refused because it was meant for another incarnation of this worker."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A router's stream, which has opened."""

    link: RouterLink


@dataclass(frozen=True, slots=True)
class Detach:
    """A router's stream, which has ended: cancel its requests here."""

    link: RouterLink


@dataclass(frozen=True, slots=True)
class Submit:
    """A new attempt at a request."""

    link: RouterLink
    submission: SubmitRequest
    """The router's submission, with all that `SubmitRequest.received_by` adds."""
    arrived: float = field(default_factory=time.monotonic)
    """The moment at which a router took it, by this worker's clock."""
    grammar: Future[Any] | None = None
    """The compiled grammar, held so that it is there when the first mask needs it."""
    trace: AttemptTrace | None = None
    """The trace of the request, if it is traced."""

    @property
    def key(self) -> RequestKey:
        """The attempt's name, and its first choice's."""
        return self.submission.key


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A command that concerns no request, and the router that gives it."""

    link: RouterLink
    command: TellPrefixesRequest | ForgetSessionRequest | WatchRequests


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The confirmed death of another worker's process."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Wake:
    """A request for a pass of the loop, for instance because a fence has passed."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """A look at the memory manager between two passes; the answer proves that the loop is alive."""

    look: Callable[[KVCacheManager], object]
    """The function that looks, called on the engine thread; it must change nothing."""


@dataclass(frozen=True, slots=True)
class FindHistory:
    """A router's search for the history of a session that another router had."""

    owner: str
    """The owner that the history must have."""
    digest: str
    answer: Callable[[array[int] | None], object]
    """The function that gets its tokens or None, called on the engine thread."""
    is_wanted: Callable[[], bool] = lambda: True
    """Whether the answer is still wanted."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A drain: retract new requests, and let those that are here go on."""

    on_drained: Callable[[], object]
    """Called once, on the engine thread, when no request is left and no forward runs."""


@dataclass(frozen=True, slots=True)
class RetractForDrain:
    """A retraction of all requests that can go on elsewhere. Follows a `Drain`, after its grace."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """An end of the engine because something else hangs. Routers are told first."""

    reason: str
    hanging_step: int | None
    """The number of the forward that hangs, and whose requests may be the cause; None: none
    hangs."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the engine's loop."""


RouterCommand: TypeAlias = Attach | Detach | Submit | CancelRequest | FromRouter
"""The commands that routers cause."""
Command: TypeAlias = (
    RouterCommand
    | Misdirected
    | PeerDied
    | Wake
    | Inspect
    | FindHistory
    | Drain
    | RetractForDrain
    | GiveUp
    | Stop
)
"""The commands that the engine's loop takes from other threads, whatever the worker's role."""

MessageT = TypeVar("MessageT")
MessageT_contra = TypeVar("MessageT_contra", contravariant=True)


class Mailbox(Protocol[MessageT_contra]):
    """The end of an inbox that messages are posted to."""

    def post(self, message: MessageT_contra, /) -> None:
        """Add a message; from any thread."""
        ...


class Inbox(Generic[MessageT]):
    """A queue that many threads post to and one thread takes from."""

    def __init__(self) -> None:
        self._messages: deque[MessageT] = deque()
        self._posted = threading.Condition()

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[MessageT]:
        """Iterate over the waiting messages, in order, without taking them. For tests."""
        return iter(list(self._messages))

    def post(self, message: MessageT, /) -> None:
        """Add a message; from any thread."""
        with self._posted:
            self._messages.append(message)
            self._posted.notify()

    def take_all(self) -> list[MessageT]:
        """Wait for a message, then take all that have come, in order."""
        with self._posted:
            while not self._messages:
                self._posted.wait()
            messages = list(self._messages)
            self._messages.clear()
            return messages
