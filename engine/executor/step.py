"""One forward: what it is to compute, what came of it, and the thread that computes it.

Requests are opaque here: a step carries them from the scheduler that planned it back to it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvrelay.engine.executor.failures import ForwardFailedError
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.kv_transfer.work_in_progress import WorkInProgress
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.batch import Int32Array
from kvrelay.text.grammar import GrammarError
from kvrelay.wire.output import SampledToken
from kvrelay.wire.speeds import NO_WORK, StepWork

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
RequestT_co = TypeVar("RequestT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Scheduled(Generic[RequestT_co]):
    """Compute a request's next tokens, for which its lease has room already."""

    request: RequestT_co
    """The forward thread does not look at it."""
    token_state: TokenState
    num_tokens: int
    """Known ones: of a prompt's chunk, or 1, the one sampled last."""
    sample: bool
    """Whether the last of them yields a new token; not on an unfinished prompt's chunk."""
    num_drafts: int = 0
    """Drafted tokens, at most, that are verified behind them."""

    @property
    def is_live(self) -> bool:
        """Whether it is computed: the step before may have ended it. On the forward thread."""
        return self.token_state.broken is None and not (self.sample and self.token_state.room == 0)


class StepOutput(NamedTuple):
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
class Step(Generic[RequestT_co]):
    """A planned forward. It has a copy of the page tables: nothing changes them later."""

    number: int
    scheduled: Sequence[Scheduled[RequestT_co]]
    page_tables: Sequence[Int32Array]
    """For each pool the page tables of all items, as in `ForwardBatch`."""
    copies: Sequence[PageCopy] = ()
    """To be made before anything is written."""

    @property
    def most_tokens(self) -> int:
        """Tokens that it computes at most, drafted ones included."""
        return sum([item.num_tokens + item.num_drafts for item in self.scheduled])


@dataclass(frozen=True, slots=True)
class StepEnded(Generic[RequestT_co]):
    """A forward's result."""

    step: Step[RequestT_co]
    outputs: Sequence[StepOutput] = ()
    """One for each of `step.scheduled`."""
    num_tokens: int = 0
    """Tokens that it computed, drafted ones included."""
    work: StepWork = NO_WORK
    """The same without the drafted ones, as far as it decides how long a forward takes."""
    begun: float = 0.0
    """When the forward began, on the clock of `time.monotonic`."""
    seconds: float = 0.0
    error: ForwardFailedError | None = None
    """The forward has failed as a whole."""

    @property
    def failure(self) -> Exception | None:
        """Why nothing came of it for any request; None: something did, or there was none."""
        if self.error is not None or not self.num_tokens:
            return self.error
        errors = [output.error for output in self.outputs]
        # A grammar that cannot go on says nothing of the forward.
        failed = [error for error in errors if not isinstance(error, GrammarError)]
        return failed[0] if failed and None not in failed else None


class Executor(Protocol):
    """Runs a step's forward and samples from it. Blocks; has a thread of its own."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, for the forwards that follow.

        After an error the worker must end: requests of later steps may need the pages.
        """
        ...

    def execute(self, step: Step[RequestT]) -> StepEnded[RequestT]:
        """Compute one step. An error that concerns one request alone is in its `StepOutput`."""
        ...


class ForwardThread(Generic[RequestT]):
    """Computes steps in order, away from the engine thread, which stays responsive.

    Args:
        executor: computes the steps.
        on_end: called with each step's end, on this thread.
        on_failure: called once, on this thread, if it must give up.
    """

    def __init__(
        self,
        executor: Executor,
        on_end: Callable[[StepEnded[RequestT]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._executor = executor
        self._on_end = on_end
        self._on_failure = on_failure
        self.work = WorkInProgress()
        """The steps that were launched and have not ended."""
        self._steps: queue.SimpleQueue[Step[RequestT] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def launch(self, step: Step[RequestT]) -> None:
        """Compute a step after those launched before it."""
        self.work.begin(step.most_tokens, step.number)
        self._steps.put(step)

    def close(self) -> None:
        """Compute what was launched, then end."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                ended = execute_or_fail(self._executor, step)
                self.work.end()
                self._on_end(ended)
        except Exception as error:
            logger.exception("the forward thread gives up")
            self._on_failure(f"{type(error).__name__}: {error}")


def execute_or_fail(executor: Executor, step: Step[RequestT]) -> StepEnded[RequestT]:
    """Compute a step. If the forward fails, no later step computes anything of its requests.

    If its page copies fail, no later step can be right: the error says that the device is broken.
    """
    begun, copied = time.monotonic(), False
    live = [item for item in step.scheduled if item.is_live]
    try:
        if step.copies:
            executor.copy(step.copies)
        copied = True
        ended = executor.execute(step)
    except Exception as error:  # whatever it was, the engine must hear of it
        logger.exception("a forward of %d requests failed", len(live))
        failed = ForwardFailedError.of(error, len(live), copied=copied)
        for item in live:
            item.token_state.broken = failed
        outputs = [StepOutput(error=item.token_state.broken) for item in step.scheduled]
        seconds = time.monotonic() - begun
        return StepEnded(step, outputs, begun=begun, seconds=seconds, error=failed)
    return replace(ended, begun=begun, seconds=time.monotonic() - begun)
