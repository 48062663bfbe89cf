"""One forward: what the role wants computed, made into tensors, run on its own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvrelay.engine.request import Request
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.sampler import Sampled, SamplingRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute the next `num_tokens` of a request, whose lease already has room for them."""

    request: Request
    num_tokens: int
    sample: bool
    """Whether the last of them yields a new token; not on an unfinished prompt's chunk."""


@dataclass(frozen=True, slots=True)
class Step:
    """A forward that was planned: it reads nothing that the scheduler changes later."""

    number: int
    scheduled: tuple[Scheduled, ...]
    batch: ForwardBatch
    sampling: tuple[SamplingRow, ...]
    """One for each scheduled request that samples, in order."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A forward's result: one entry for each of `step.scheduled`, `None` where none is sampled."""

    step: Step
    tokens: tuple[Sampled | None, ...] = ()
    seconds: float = 0.0
    error: Exception | None = None


class Computer(Protocol):
    """Runs a step's forward and samples from it. Blocks; has a thread of its own."""

    def compute(self, step: Step) -> Sequence[Sampled]:
        """One token, or the reason why there is none, for each of `step.sampling`."""
        ...


def plan_step(number: int, scheduled: Sequence[Scheduled], ledger: Ledger) -> Step:
    """Make the forward's input and commit the tokens that it will write."""
    input_ids: list[int] = []
    positions: list[np.ndarray] = []
    leases = [item.request.held for item in scheduled]
    starts = [lease.kv_committed_len for lease in leases]
    ends = [start + item.num_tokens for start, item in zip(starts, scheduled, strict=True)]
    for item, start, end in zip(scheduled, starts, ends, strict=True):
        input_ids += item.request.token_ids(start, end)
        positions.append(np.arange(start, end))
        item.request.last_step = number
    ledger.commit_all(leases, ends)
    query_start = np.cumsum([0, *(item.num_tokens for item in scheduled)])
    sampled = [index for index, item in enumerate(scheduled) if item.sample]
    batch = ForwardBatch(
        input_ids=np.asarray(input_ids, np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        query_start=query_start.astype(np.int32),
        seq_lens=np.asarray(ends, np.int32),
        page_tables=ledger.page_tables(leases),
        logit_rows=query_start[1:][sampled].astype(np.int64) - 1,
    )
    rows = tuple(_sampling_row(scheduled[index].request) for index in sampled)
    return Step(number, tuple(scheduled), batch, rows)


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.sampling,
        position=request.num_tokens,
        prompt_ids=request.prompt_ids,
        output_ids=tuple(request.output_ids) if request.sampling.edits_logits else (),
        banned_ids=request.stops.banned_ids(len(request.output_ids)),
    )


class ForwardThread:
    """Computes steps in order, away from the engine thread, which stays responsive.

    Args:
        computer: does the work.
        on_end: called with each step's end, on this thread.
        on_failure: called once, on this thread, if it must give up.
    """

    def __init__(
        self,
        computer: Computer,
        on_end: Callable[[StepEnded], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._computer = computer
        self._on_end = on_end
        self._on_failure = on_failure
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def launch(self, step: Step) -> None:
        """Compute a step after those launched before it."""
        self._steps.put(step)

    def close(self) -> None:
        """Compute what was launched, then end."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                self._on_end(self._compute(step))
        except Exception as error:
            logger.exception("the forward thread gives up")
            self._on_failure(f"{type(error).__name__}: {error}")

    def _compute(self, step: Step) -> StepEnded:
        begun = time.monotonic()
        try:
            sampled = iter(self._computer.compute(step))
        except Exception as error:  # whatever it was, the engine must hear of it
            return StepEnded(step, error=error)
        tokens = tuple(next(sampled) if item.sample else None for item in step.scheduled)
        return StepEnded(step, tokens, time.monotonic() - begun)
