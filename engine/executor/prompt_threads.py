"""Lets a step with a chunk of a prompt, or many rows, compute on cores of workers that do not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvrelay.model_runner.kernels.kernel_threads import KernelThreads
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


def worth_of(work: StepWork) -> frozenset[str]:
    """For which of its parts, "prompts" and "rows", a step may have others' cores."""
    parts = {"prompts": work.prompt_tokens >= FEWEST_TOKENS, "rows": work.rows >= FEWEST_ROWS}
    return frozenset(part for part, is_worth in parts.items() if is_worth)


class Neighbours(Protocol):
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


class PromptThreads:
    """Chooses the threads of a step: `ModelExecutor` has it do so for each.

    Threads are borrowed for a layer at a time: a worker that begins to compute has its cores back
    when the layer ends in which it began. Several busy ones share the idle ones' cores.

    Of anything else that runs on the machine nobody knows, and it can make a layer slower than the
    worker's own threads would: all threads have to come to the end of each product, and one that
    waits for a CPU holds up the others. So the first layer of a step has the worker's own threads,
    and tells what others must be faster than. If they are not, the step goes on without, and so do
    those that come soon.

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
        neighbours: Neighbours,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._threads = threads
        self._most = most
        self._neighbours = neighbours
        self._clock = clock
        self._resume_at = -math.inf
        self._pause = _FIRST_PAUSE
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
        if not worth_of(work) or self._clock() < self._resume_at:
            yield
            return
        self._neighbours.find()
        self._layers = self._late_layers = 0
        with self._threads.widened(self._offer) as most:
            yield
            self.widening = most() / self._threads.own
        if self._gives_up:
            self._resume_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self.widening > 1:
            self._pause = _FIRST_PAUSE

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
