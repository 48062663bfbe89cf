"""Lets steps with chunks of prompts, or many rows, compute on the cores of workers that compute
nothing."""

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
"""Of prompts in a step that other workers' cores are worth: with fewer, most of its time is spent
reading weights and on what only one thread does."""
FEWEST_ROWS: Final = 16
"""That generate in a step which other workers' cores are worth, for the same reason."""
_LATE_LAYERS: Final = 2
"""With borrowed threads and no faster than without: the step borrows no more after so many."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds until a step tries again, each time twice as many, up to the latter."""


class Part(Flag):
    """Of a step's work."""

    PROMPTS = auto()
    ROWS = auto()


NO_PART: Final = Part(0)


def worthy_parts(work: StepWork) -> Part:
    """Those of a step for which it may have others' cores."""
    prompts = Part.PROMPTS if work.prompt_tokens >= FEWEST_TOKENS else NO_PART
    return prompts | (Part.ROWS if work.rows >= FEWEST_ROWS else NO_PART)


@dataclass(slots=True)
class _Pause:
    """When steps of a kind may borrow again, after those that were no faster for it."""

    seconds: float = _FIRST_PAUSE
    """Of the next one."""
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
        """See who has come and who has gone."""
        ...

    def count_threads(self) -> tuple[int, int]:
        """Threads of those that compute now, and of those that do not. A microsecond each."""
        ...


class BorrowedThreads:
    """Chooses the threads of a step: `ModelExecutor` has it do so for each.

    Threads are borrowed for a layer at a time: a worker that begins to compute has its cores back
    when the layer ends in which it began. Several busy ones share the idle ones' cores.

    Of anything else that runs on the machine nobody knows, and it can make a layer slower than the
    worker's own threads would: all threads have to come to the end of each product, and one that
    waits for a CPU holds up the others. So the first layer of a step has the worker's own threads,
    and tells what others must be faster than. If they are not, the step goes on without, and so do
    those that come soon for the same parts: rows gain less than prompts, which may still borrow.

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
        """Compute a step here: with its own threads, and with those that it may borrow."""
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
        """Threads that the next layer may have, perhaps fewer than the worker's own."""
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
        # Who is busy may borrow as well: each has a part, by its threads.
        borrowed = idle * own // (own + busy)
        return min(self._most, own + borrowed, self._neighbours.num_cores - busy)
