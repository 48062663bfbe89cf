"""Lets a step with a chunk of a prompt compute on the cores of workers that compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvrelay.model_runner.kernels.kernel_threads import KernelThreads
from kvrelay.wire.speeds import StepWork

FEWEST_TOKENS: Final = 64
"""Of prompts in a step that other workers' cores are worth: with fewer, most of its time is spent
reading weights and on what only one thread does."""


class Neighbours(Protocol):
    """The other workers of this machine, as far as they compute on this one's cores."""

    @property
    def num_cores(self) -> int:
        """Cores that this worker's process may run on."""
        ...

    def count_free_cpus(self, own: int) -> int:
        """CPUs of the whole machine that nothing runs on but `own` threads of this worker.

        Some microseconds. Less than `own`, even than 0, where threads wait for a CPU.
        """
        ...

    def find(self) -> None:
        """See who has come and who has gone."""
        ...

    def count_threads(self) -> tuple[int, int]:
        """Threads of those that compute now, and of those that do not. A microsecond each."""
        ...


class PromptThreads:
    """Chooses the threads of a step: `ModelExecutor` has it do so for each.

    Threads are borrowed for a layer at a time. A worker that begins to compute has its cores back
    when the layer ends in which it began; so has anything else that runs on the machine. All
    threads have to come to the end of each product: one that waits for a CPU holds up the others.

    Args:
        threads: those of the model, and of its draft model.
        most: threads of a step.
        neighbours: whose cores may be borrowed.
    """

    def __init__(self, threads: KernelThreads, most: int, neighbours: Neighbours) -> None:
        self._threads = threads
        self._most = most
        self._neighbours = neighbours
        self.widening = 1.0
        """How many times its own threads the latest step had, at most."""

    @contextmanager
    def chosen(self, work: StepWork) -> Iterator[None]:
        """Compute a step here: with its own threads, and with those that it may borrow."""
        self.widening = 1.0
        if work.prompt_tokens < FEWEST_TOKENS or self._most <= self._threads.own:
            yield
            return
        self._neighbours.find()
        with self._threads.widened(self._offer) as most:
            yield
            self.widening = most() / self._threads.own

    def _offer(self) -> int:
        """Threads that a step may have now, perhaps fewer than the worker's own."""
        busy, idle = self._neighbours.count_threads()
        free_cores = self._neighbours.num_cores - busy
        free_cpus = self._neighbours.count_free_cpus(self._threads.count)
        return min(self._most, self._threads.own + idle, free_cores, free_cpus)
