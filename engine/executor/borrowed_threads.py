"""Threads that a large step borrows: it computes on the cores of workers that compute nothing."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Flag, auto
from typing import Final, Protocol

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.wire.speeds import StepWork

FEWEST_TOKENS: Final = 64
"""The fewest prompt tokens for which a step borrows cores. With fewer, it mostly reads weights or
does what only one thread can do."""
FEWEST_ROWS: Final = 16
"""The fewest generating requests for which a step borrows cores, for the same reason."""
_LATE_LAYERS: Final = 2
"""Layers that may be no faster with borrowed threads; after this many the step stops borrowing."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds until steps may borrow again. The pause doubles each time, up to the longest."""


class Part(Flag):
    """The parts of a step's work."""

    PROMPTS = auto()
    ROWS = auto()


NO_PART: Final = Part(0)


def worthy_parts(work: StepWork) -> Part:
    """The parts of a step that are large enough to borrow cores for."""
    prompts = Part.PROMPTS if work.prompt_tokens >= FEWEST_TOKENS else NO_PART
    return prompts | (Part.ROWS if work.rows >= FEWEST_ROWS else NO_PART)


@dataclass(slots=True)
class _Pause:
    """The time in which steps of one kind may not borrow, after borrowing was no faster."""

    seconds: float = _FIRST_PAUSE
    """The length of the next pause."""
    ends: float = -math.inf

    def begin(self, now: float) -> None:
        self.ends = now + self.seconds
        self.seconds = min(2 * self.seconds, _LONGEST_PAUSE)


class OtherWorkers(Protocol):
    """The other workers of this machine, as far as they compute on this one's cores."""

    @property
    def num_cores(self) -> int:
        """Cores that this worker's process may run on."""
        ...

    def find(self) -> None:
        """Find out which workers have come and which have gone."""
        ...

    def count_threads(self) -> tuple[int, int]:
        """Count the threads of computing workers and of idle ones. A microsecond each."""
        ...


class BorrowedThreads:
    """The choice of threads for each step of `ModelExecutor`.

    Threads are borrowed for one layer at a time. A worker that begins to compute gets its cores
    back at the end of the current layer. Several busy workers share the idle ones' cores.

    Other processes on the machine are not known here, and can make a layer slower than with the
    worker's own threads. All threads must reach the end of each product, so one that waits for a
    CPU delays the others.

    So the first layer of a step runs on the worker's own threads, and sets the time to beat. If
    borrowed threads do not beat it, the step goes on without them. So do the next steps with the
    same parts, for a while: rows gain less than prompts, which may still borrow.

    Args:
        threads: those of the model, and of its draft model.
        most: threads of a step.
        neighbours: whose cores may be borrowed.
        clock: in seconds.
    """

    def __init__(
        self,
        threads: KernelThreads,
        most: int,
        neighbours: OtherWorkers,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._threads = threads
        self._most = most
        self._neighbours = neighbours
        self._clock = clock
        self._pauses: defaultdict[Part, _Pause] = defaultdict(_Pause)
        self._layers = 0
        self._layer_began = 0.0
        self._own_seconds = math.inf
        self._late_layers = 0
        self.widening = 1.0
        """How many times its own threads the latest step had, at most."""

    @contextmanager
    def chosen(self, work: StepWork) -> Iterator[None]:
        """Compute a step in this context, with its own threads and any that it may borrow."""
        self.widening = 1.0
        parts = worthy_parts(work)
        pause = self._pauses[parts]
        if not parts or self._clock() < pause.ends:
            yield
            return
        self._neighbours.find()
        self._layers = self._late_layers = 0
        with self._threads.widened(self._offer) as most:
            yield
            self.widening = most() / self._threads.own
        if self._gives_up:
            pause.begin(self._clock())
        elif self.widening > 1:
            pause.seconds = _FIRST_PAUSE

    @property
    def _gives_up(self) -> bool:
        return self._late_layers >= _LATE_LAYERS

    def _offer(self) -> int:
        """Count the threads that the next layer may have, perhaps fewer than the worker's own."""
        own = self._threads.own
        now = self._clock()
        seconds, self._layer_began = now - self._layer_began, now
        self._layers += 1
        if self._layers == 1:
            return own
        if self._layers == 2:
            self._own_seconds = seconds
        elif self._threads.count > own and seconds >= self._own_seconds:
            self._late_layers += 1
        if self._gives_up:
            return own
        busy, idle = self._neighbours.count_threads()
        # Busy workers may borrow as well: each gets a share in proportion to its threads.
        borrowed = idle * own // (own + busy)
        return min(self._most, own + borrowed, self._neighbours.num_cores - busy)
