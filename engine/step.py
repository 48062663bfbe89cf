"""One forward: what the role wants computed, planned here, computed on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from kvrelay.engine.request import Request
from kvrelay.engine.tape import Tape
from kvrelay.mem_cache.lease import Batch
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.batch import Int32Array
from kvrelay.model_runner.sampler import SampledToken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute a request's next tokens, for which its lease has room already."""

    request: Request
    """The forward thread does not look at it."""
    tape: Tape
    num_tokens: int
    """Known ones: of a prompt's chunk, or 1, the one sampled last."""
    sample: bool
    """Whether the last of them yields a new token; not on an unfinished prompt's chunk."""
    num_drafts: int = 0
    """Drafted tokens, at most, that are verified behind them."""


class Computed(NamedTuple):
    """What came of one `Scheduled`."""

    tokens: Sequence[SampledToken] = ()
    """That follow each other in one output; of a prompt, the first one of each choice."""
    error: Exception | None = None
    """Why there are no more of them: the request cannot go on."""
    num_drafts: int = 0
    """Drafted tokens that were verified."""
    prompt_logprobs: Sequence[SampledToken] = ()
    """Of the tokens that follow those of a prompt's chunk, in the prompt."""

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the model sampled; but for an error, one more token follows them."""
        return len(self.tokens) - (self.error is None) if self.num_drafts else 0


@dataclass(frozen=True, slots=True)
class Step:
    """A forward that was planned: the page tables are its own, nothing changes them later."""

    number: int
    scheduled: Sequence[Scheduled]
    page_tables: Sequence[Int32Array]
    """See `ForwardBatch`."""
    copies: Sequence[PageCopy] = ()
    """To be made before anything is written."""


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A forward's result: one entry for each of `step.scheduled`."""

    step: Step
    computed: Sequence[Computed] = ()
    num_tokens: int = 0
    """That it computed, drafted ones included."""
    seconds: float = 0.0
    error: Exception | None = None
    """The forward has failed as a whole."""


class Computer(Protocol):
    """Runs a step's forward and samples from it. Blocks; has a thread of its own."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, for the forwards that follow.

        There is nobody to blame for an error: requests of later steps may need the pages.
        """
        ...

    def compute(self, step: Step) -> StepEnded:
        """Compute one step. What one request alone is to blame for is in its own `Computed`."""
        ...


def plan_step(
    number: int, scheduled: Sequence[Scheduled], copies: Sequence[PageCopy], ledger: Ledger
) -> Step:
    """Take a snapshot of the page tables, and commit the tokens that will surely be written."""
    if not scheduled:
        return Step(number, scheduled, (), copies)
    batch = Batch(item.request.held for item in scheduled)
    for item in scheduled:
        item.request.last_step = number
    counts = np.array([item.num_tokens for item in scheduled])
    ledger.commit_all(batch, ledger.committed(batch) + counts)
    return Step(number, scheduled, ledger.page_tables(batch), copies)


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
                self._on_end(compute_or_fail(self._computer, step))
        except Exception as error:
            logger.exception("the forward thread gives up")
            self._on_failure(f"{type(error).__name__}: {error}")


def compute_or_fail(computer: Computer, step: Step) -> StepEnded:
    """Compute a step; if that fails, nothing of its requests is computed any more.

    But if its copies fail, the error is raised.
    """
    begun = time.monotonic()
    if step.copies:
        computer.copy(step.copies)
    try:
        ended = computer.compute(step)
    except Exception as error:  # whatever it was, the engine must hear of it
        for item in step.scheduled:
            item.tape.broken = item.tape.broken or error
        return StepEnded(step, error=error)
    return replace(ended, seconds=time.monotonic() - begun)
