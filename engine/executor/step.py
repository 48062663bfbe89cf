"""One forward: what it is to compute, what came of it, and what computes it.

Requests are opaque here: a step carries them from the scheduler that planned it back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvrelay.device.device_streams import PASSED, DeviceEvent
from kvrelay.engine.executor.failures import ForwardFailedError
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.model_runner.batch import Int32Array
from kvrelay.text.grammar import GrammarError
from kvrelay.wire.output import SampledToken
from kvrelay.wire.speeds import NO_WORK, StepWork

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
        state = self.token_state
        return state.broken is None and not (self.sample and state.room == 0)


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


@dataclass(eq=False, slots=True)
class StepEnded(Generic[RequestT_co]):
    """A forward's result. Who has launched it adds when that was; then it stays as it is."""

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
    widening: float = 1.0
    """How many times the worker's own threads it had, at most; the others ran on cores of idle
    workers."""

    @property
    def failure(self) -> Exception | None:
        """Why nothing came of it for any request; None: something did, or there was none."""
        if self.error is not None or not self.num_tokens:
            return self.error
        errors = [output.error for output in self.outputs]
        # A grammar that cannot go on says nothing of the forward.
        failed = [error for error in errors if not isinstance(error, GrammarError)]
        return failed[0] if failed and None not in failed else None


@dataclass(eq=False, slots=True)
class LaunchedStep(Generic[RequestT]):
    """A forward that was launched. Until `home` has passed the device may work on it."""

    step: Step[RequestT]
    home: DeviceEvent = PASSED
    """Behind all of it, its page copies before and its results' way to the host included."""


class Executor(Protocol):
    """Launches steps in order and ends them in order, on a thread of its own."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Launch copies of pages, for the forwards that follow.

        After an error the worker must end: requests of later steps may need the pages.
        """
        ...

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """Launch a step: its forward, and what it samples. Raises whatever they raise.

        On a device that works by itself one other step may be launched and not ended, but for what
        `must_wait` says.
        """
        ...

    def must_wait(self, step: Step[RequestT]) -> bool:
        """Whether `step` can be launched only once the tokens of the one before are known."""
        ...

    def finish(self, launched: LaunchedStep[RequestT]) -> StepEnded[RequestT]:
        """Wait for a step's results and read them. Moves its requests' token states on.

        An error that concerns one request alone is in its `StepOutput`. Raises what the device
        says if the forward has failed.
        """
        ...

    def wait(self) -> None:
        """Wait until nothing that was launched runs. Raises what the device says."""
        ...


class PassingExecutor:
    """An executor that leaves everything to another one; a base for those that do more.

    Args:
        executor: the other one.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `Executor`."""
        self._executor.copy(copies)

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """See `Executor`."""
        return self._executor.launch(step)

    def must_wait(self, step: Step[RequestT]) -> bool:
        """See `Executor`."""
        return self._executor.must_wait(step)

    def finish(self, launched: LaunchedStep[RequestT]) -> StepEnded[RequestT]:
        """See `Executor`."""
        return self._executor.finish(launched)

    def wait(self) -> None:
        """See `Executor`."""
        self._executor.wait()
