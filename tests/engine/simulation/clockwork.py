"""A cluster under a virtual clock: messages take no time, forwards do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrelay.engine.executor.step import Scheduled, Step
from kvrelay.engine.scheduler.commands import Wake
from kvrelay.mem_cache.host.tier_copies import PageMoves
from kvrelay.mem_cache.storage.storage_orders import StorageOrder
from kvrelay.wire.output import RequestOutput
from tests.engine.simulation.cluster import Simulation
from tests.engine.simulation.router import SimRequest
from tests.engine.simulation.worker import SimWorker


@dataclass(frozen=True)
class Forward:
    """One that runs."""

    step: Step[Any]
    ends: float


@dataclass(frozen=True)
class Copying:
    """A copy between the device and the host that runs."""

    moves: PageMoves
    ends: float


@dataclass(frozen=True)
class Storing:
    """What storage does."""

    order: StorageOrder
    ends: float


class Clockwork(Simulation):
    """A test may replace `step_seconds` or `copy_seconds`, besides what `Simulation` names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clock = 0.0
        self._runs: dict[SimWorker, Forward] = {}
        self._copies: dict[SimWorker, Copying] = {}
        self._stored: dict[SimWorker, Storing] = {}
        self.ended_at: dict[SimRequest, float] = {}
        self.emitted_at: dict[SimRequest, list[float]] = {}
        """For each request the moments of its tokens."""

    def step_seconds(self, step: Step[Any]) -> float:
        """How long a forward takes."""
        return 0.01 + 0.0002 * sum(item.num_tokens for item in step.scheduled)

    def run_until(self, moment: float) -> None:
        """Let everything happen that happens before `moment`."""
        while True:
            self._wake()
            if self.step():
                continue
            ends = [self._runs[worker].ends for worker in self.workers if worker.steps]
            ends += [min(worker.wakes) for worker in self.workers if worker.wakes]
            ends += [self._copies[worker].ends for worker in self.workers if worker.copies]
            ends += [
                self._stored[worker].ends
                for worker in self.workers
                if worker.storage is not None and worker.storage.orders
            ]
            if not ends or min(ends) > moment:
                break
            self.clock = min(ends)
        self.clock = max(self.clock, moment)

    def _wake(self) -> None:
        for worker in self.workers:
            if any(moment <= self.clock for moment in worker.wakes):
                worker.wakes = [moment for moment in worker.wakes if moment > self.clock]
                worker.inbox.post(Wake())

    def can_end_step(self, worker: SimWorker) -> bool:
        """Whether the clock has reached its oldest forward's end."""
        step, runs = worker.steps[0], self._runs.get(worker)
        if runs is None or runs.step is not step:
            # The clock goes on only when nothing else can happen: it begins now.
            worker.forward_seconds = self.step_seconds(step)
            runs = self._runs[worker] = Forward(step, self.clock + worker.forward_seconds)
        return runs.ends <= self.clock

    def copy_seconds(self, worker: SimWorker, moves: PageMoves) -> float:
        """How long a copy between the device and the host takes."""
        return 0.0

    def can_end_copy(self, worker: SimWorker) -> bool:
        """Whether the clock has reached its oldest copy's end."""
        moves, runs = worker.copies[0], self._copies.get(worker)
        if runs is None or runs.moves is not moves:
            worker.copy_seconds = self.copy_seconds(worker, moves)
            runs = self._copies[worker] = Copying(moves, self.clock + worker.copy_seconds)
        return runs.ends <= self.clock

    def storage_seconds(self, order: StorageOrder) -> float:
        """How long storage takes for what was ordered of it."""
        return 0.0

    def can_end_storage(self, worker: SimWorker) -> bool:
        """Whether the clock has reached the end of its oldest order of storage."""
        assert worker.storage is not None
        order, runs = worker.storage.orders[0], self._stored.get(worker)
        if runs is None or runs.order is not order:
            worker.storage_seconds = self.storage_seconds(order)
            runs = self._stored[worker] = Storing(order, self.clock + worker.storage_seconds)
        return runs.ends <= self.clock

    def now(self) -> float:
        return self.clock

    def ended(self, request: SimRequest) -> None:
        self.ended_at[request] = self.clock

    def take_output(self, worker: SimWorker, output: RequestOutput) -> None:
        moments = self.emitted_at.setdefault(self.requests[output.key], [])
        moments += [self.clock] * len(output.tokens)
        super().take_output(worker, output)


def is_prompt(item: Scheduled[Any]) -> bool:
    """Whether a part of a step computes a chunk of a prompt."""
    return item is not getattr(item.request, "every_step", None)
