"""A read of a peer's pages, from its order to its end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto

from kvrelay.mem_cache.geometry import Int64Array


class PullState(Enum):
    """Where a pull is. Only the transfer agent's thread moves it on."""

    QUEUED = auto()
    """Ordered; no byte has moved."""
    RUNNING = auto()
    """Bytes arrive at any time."""
    DONE = auto()
    """Every byte is there."""
    FAILED = auto()
    """It will not complete; `settled` tells whether bytes may still arrive."""


@dataclass(eq=False, slots=True)
class Pull:
    """One READ of `remote_pages` of a peer into `local_pages` of this worker's pools.

    Or a probe, of scratch pages in place of the pools, in one direction or the other.

    It is its own fence: the local pages may be used again once `passed`, that
    is when it ended well, never started, or the process it read from is
    confirmed dead. An error alone proves nothing: other pieces of the same
    read may still be arriving.
    """

    peer: str
    """Incarnation of the worker that is read from."""
    local_pages: tuple[Int64Array, ...]
    """For each pool."""
    remote_pages: tuple[Int64Array, ...]
    state: PullState = PullState.QUEUED
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    backend: str = ""
    """That NIXL has chosen; told of probes alone."""
    _settled: threading.Event = field(default_factory=threading.Event)

    @property
    def num_pages(self) -> int:
        """Pages that it reads, of all pools together."""
        return sum(map(len, self.local_pages))

    def settle(self) -> None:
        """No byte of this pull will arrive any more. Called by the agent's thread."""
        self._settled.set()

    def passed(self) -> bool:
        """See `mem_cache.fence.Fence`."""
        return self._settled.is_set()
