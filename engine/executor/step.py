"""A step (one forward): what it computes, its results, and the interface of its executor.

Requests are opaque here: the scheduler that planned a step gets them back with its end.
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
    """An item of a step: the next tokens of a request, whose lease has room for them already."""

    request: RequestT_co
    """The scheduler's request, which the forward thread does not look at."""
    token_state: TokenState
    num_tokens: int
    """Known tokens to compute: those of a prompt's chunk, or 1, the one sampled last."""
    sample: bool
    """Whether the last of them yields a new token; False for a chunk that does not end the
    prompt."""
    num_drafts: int = 0
    """The most drafted tokens that are verified behind them."""

    @property
    def is_live(self) -> bool:
        """Whether it is computed: the previous step may have ended it. On the forward thread."""
        state = self.token_state
        return state.broken is None and not (self.sample and state.room == 0)

    @property
    def may_be_masked(self) -> bool:
        """Whether a grammar, or a budget of reasoning, may forbid tokens that it samples."""
        return self.sample and self.token_state.may_be_masked(self.num_drafts)

    @property
    def has_token_rules(self) -> bool:
        """Whether its client allows or bans tokens."""
        return self.sample and self.token_state.params.sampling.has_token_rules


class StepOutput(NamedTuple):
    """The result of one `Scheduled`."""

    tokens: Sequence[SampledToken] = ()
    """The next tokens of one output; for a prompt, the first token of each choice."""
    error: Exception | None = None
    """The reason why the request cannot go on; None: it can."""
    num_drafts: int = 0
    """Drafted tokens that were verified."""
    prompt_logprobs: Sequence[SampledToken] = ()
    """The log-probabilities of the prompt tokens that follow a chunk's tokens."""

    @property
    def num_accepted(self) -> int:
        """The drafted tokens that the model accepted; without an error one more token follows."""
        return len(self.tokens) - (self.error is None) if self.num_drafts else 0


@dataclass(frozen=True, slots=True)
class Step(Generic[RequestT_co]):
    """A planned forward. It has a copy of the page tables: nothing changes them later."""

    number: int
    scheduled: Sequence[Scheduled[RequestT_co]]
    page_tables: Sequence[Int32Array]
    """The page tables of all items, one array for each pool, as in `ForwardBatch`."""
    copies: Sequence[PageCopy] = ()
    """Page copies to make before anything is written."""

    @property
    def most_tokens(self) -> int:
        """The most tokens that it may compute, drafted ones included."""
        return sum([item.num_tokens + item.num_drafts for item in self.scheduled])


@dataclass(eq=False, slots=True)
class StepEnded(Generic[RequestT_co]):
    """The result of a forward. The launcher adds its times; after that it does not change."""

    step: Step[RequestT_co]
    outputs: Sequence[StepOutput] = ()
    """One for each of `step.scheduled`."""
    num_tokens: int = 0
    """Tokens that it computed, drafted ones included."""
    work: StepWork = NO_WORK
    """The work without drafted tokens, as far as it decides how long a forward takes."""
    begun: float = 0.0
    """The moment when the forward began, on the clock of `time.monotonic`."""
    seconds: float = 0.0
    error: ForwardFailedError | None = None
    """The error of the forward as a whole."""
    widening: float = 1.0
    """The threads that it had at most, as a multiple of the worker's own; the others ran on cores
    of idle workers."""

    @property
    def failure(self) -> Exception | None:
        """The reason why every request failed; None: some did not, or there were none."""
        if self.error is not None or not self.num_tokens:
            return self.error
        errors = [output.error for output in self.outputs]
        # A grammar that cannot go on is no fault of the forward.
        failed = [error for error in errors if not isinstance(error, GrammarError)]
        return failed[0] if failed and None not in failed else None


@dataclass(eq=False, slots=True)
class LaunchedStep(Generic[RequestT]):
    """A forward that was launched. The device may work on it until `home` has passed."""

    step: Step[RequestT]
    home: DeviceEvent = PASSED
    """The event behind all its work, from its page copies to the transfer of results to the
    host."""
    awaits_tokens: bool = False
    """Whether `Executor.sample` must follow, once the tokens of the step before are known."""


class Executor(Protocol):
    """An interface that launches steps in order and ends them in order, on its own thread."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Launch copies of pages, for the forwards that follow.

        After an error the worker must end: requests of later steps may need the pages.
        """
        ...

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """Launch a step: its forward and its sampling. Raises whatever they raise.

        On a GPU one other step may be launched and not yet ended, unless `must_wait` says
        otherwise. If the result `awaits_tokens`, its sampling is not launched yet.
        """
        ...

    def sample(self, launched: LaunchedStep[RequestT]) -> None:
        """Launch the sampling of a step that `awaits_tokens`; the step before it has ended."""
        ...

    def must_wait(self, step: Step[RequestT]) -> bool:
        """Whether `step` can be launched only once the previous step's tokens are known.

        Its forward, that is: what only its sampling needs is in `LaunchedStep.awaits_tokens`.
        """
        ...

    def finish(self, launched: LaunchedStep[RequestT]) -> StepEnded[RequestT]:
        """Wait for a step's results and read them. Advances its requests' token states.

        An error that concerns one request alone is in its `StepOutput`. Raises the device's error
        if the forward has failed.
        """
        ...

    def wait(self) -> None:
        """Wait until nothing that was launched runs. Raises the device's error, if any."""
        ...


class PassingExecutor:
    """An executor that delegates to another one; a base class for wrappers.

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

    def sample(self, launched: LaunchedStep[RequestT]) -> None:
        """See `Executor`."""
        self._executor.sample(launched)

    def must_wait(self, step: Step[RequestT]) -> bool:
        """See `Executor`."""
        return self._executor.must_wait(step)

    def finish(self, launched: LaunchedStep[RequestT]) -> StepEnded[RequestT]:
        """See `Executor`."""
        return self._executor.finish(launched)

    def wait(self) -> None:
        """See `Executor`."""
        self._executor.wait()
