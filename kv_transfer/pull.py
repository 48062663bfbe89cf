"""A read of a peer's pages, from its order to its end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from kvrelay.mem_cache.fence import FenceKind
from kvrelay.mem_cache.geometry import Int64Array

TIMEOUTS_A_READ: Final = 4
"""The longest time of a read, as a multiple of the time that a peer may be silent."""


class PullState(Enum):
    """The state of a pull."""

    QUEUED = auto()
    """The pull is ordered; no byte has moved."""
    RUNNING = auto()
    """Bytes arrive at any time."""
    DONE = auto()
    """Every byte has arrived."""
    FAILED = auto()
    """The pull will not complete. `Pull.passed` tells whether bytes may still arrive."""


TRANSITIONS: Final = {
    PullState.QUEUED: {PullState.RUNNING, PullState.FAILED},
    PullState.RUNNING: {PullState.DONE, PullState.FAILED},
    PullState.DONE: set[PullState](),
    PullState.FAILED: set[PullState](),
}
"""Every step that a pull can take. `start` runs it, `refuse` fails one that never ran, and `finish`
or `fail` end it. Only the transfer thread takes them."""


@dataclass(eq=False, slots=True)
class Pull:
    """One READ of `remote_pages` of a peer into `local_pages` of this worker's pools.

    It can also be a probe. A probe moves scratch pages in one direction or the other, or reads from
    the peer's host pool into scratch pages.

    It is its own fence: the local pages may be used again once it has `passed`. It passes when it
    ended well, never started, or the NIXL agent that ran it is destroyed. An error alone proves
    nothing: other pieces of the same read may still be arriving. Nor does the peer's death: its
    kernel still sends what it had written.
    """

    peer: str
    """The incarnation of the worker that is read from."""
    local_pages: tuple[Int64Array, ...]
    """Page ids, an array for each pool."""
    remote_pages: tuple[Int64Array, ...]
    """Page ids, an array for each pool of the same length as in `local_pages`."""
    state: PullState = PullState.QUEUED
    from_host: bool = False
    """Whether the peer's pages lie in its host pools."""
    error: str = ""
    """The reason why it failed."""
    nbytes: int = 0
    began: float = 0.0
    """The moment when the transfer thread took it up, on the clock of `time.monotonic`."""
    seconds: float = 0.0
    """The seconds from its start to its end."""
    backend: str = ""
    """The backend that NIXL has chosen; only known for probes."""
    _settled: threading.Event = field(default_factory=threading.Event)

    @property
    def num_pages(self) -> int:
        """The number of pages that it reads, of all pools together."""
        return sum(map(len, self.local_pages))

    def start(self, nbytes: int) -> None:
        """Note that NIXL has it: bytes arrive from now on."""
        self._move_to(PullState.RUNNING)
        self.nbytes = nbytes

    def refuse(self, error: str) -> None:
        """Note that it was never given to NIXL, so no byte can arrive."""
        assert self.state is PullState.QUEUED
        self._move_to(PullState.FAILED)
        self.error = error
        self.settle()

    def finish(self, seconds: float) -> None:
        """Note that every byte has arrived."""
        self._move_to(PullState.DONE)
        self.seconds = seconds
        self.settle()

    def fail(self, error: str, seconds: float) -> None:
        """Note that NIXL has reported an error. Bytes may still arrive, until `settle`."""
        self._move_to(PullState.FAILED)
        self.error, self.seconds = error, seconds

    def settle(self) -> None:
        """Let the fence pass: no byte of this pull will arrive any more."""
        self._settled.set()

    @property
    def kind(self) -> FenceKind:
        """See `mem_cache.fence.Fence`."""
        return FenceKind.FAILED_READ if self.state is PullState.FAILED else FenceKind.READ

    def passed(self) -> bool:
        """Whether no byte of this pull can arrive any more, see `mem_cache.fence.Fence`."""
        return self._settled.is_set()

    def _move_to(self, state: PullState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state.name} to {state.name}"
        self.state = state
