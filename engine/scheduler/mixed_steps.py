"""Steps that generate for the running batch and compute chunks of prompts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.scheduler.choices import fork_and_run
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.itl_target import ItlTarget
from kvrelay.engine.scheduler.prompts_in_progress import ComputingPrompts, PromptRun
from kvrelay.engine.scheduler.running_batch import GeneratingRequest, RunningBatch
from kvrelay.engine.scheduler.suspects import Turns
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.output import SampledToken
from kvrelay.wire.speeds import StepWork

RequestT = TypeVar("RequestT", bound=GeneratingRequest)

_PROMPT_SHARE = 4
"""The least share of a step's budget for prompts, however many requests generate: one token in this
many."""
_ANY_BACKLOG = 1 << 30
"""The backlog in tokens that counts when chunks do not delay any request yet, but may soon."""
_LONG_STEP_SECONDS = 0.01
"""The shortest long step, many times as long as planning one."""


class Newcomers:
    """The requests that are computed elsewhere and are about to generate here. By default none.

    They wait for the steps in flight when they come.
    """

    @property
    def are_coming(self) -> bool:
        """Whether one is being computed elsewhere."""
        return False

    @property
    def join_next(self) -> bool:
        """Whether one has been computed, and is about to generate."""
        return False


class MixedSteps(Generic[RequestT]):
    """The steps of a worker that computes prompts and generates, and the handling of their outputs.

    A prompt that is complete joins the running batch.

    Args:
        context: the worker's memory, requests and outputs.
        running: the requests that generate.
        growth: learns if the choices of a request do not fit together.
        itl_target: bounds the chunks beside those that generate.
        chunk_tokens: bounds all chunks; the only bound when nothing generates.
        newcomers: requests that are computed elsewhere, and will generate here.
    """

    def __init__(
        self,
        context: SchedulerContext[RequestT],
        running: RunningBatch[RequestT],
        growth: GrowthReserve,
        itl_target: ItlTarget,
        chunk_tokens: int,
        newcomers: Newcomers | None = None,
    ) -> None:
        self._context = context
        self._running = running
        self._growth = growth
        self._itl_target = itl_target
        self._chunk_tokens = chunk_tokens
        self._newcomers = newcomers or Newcomers()
        self._turns: Turns[RequestT] = Turns()
        self.computing: ComputingPrompts[RequestT] = ComputingPrompts(context)
        """The prompts that are computed here."""

    def schedule(self) -> Sequence[Scheduled[RequestT]]:
        """Allocate the next token of all requests that generate, and prompt chunks beside them.

        No long step is planned ahead while a request is about to join the running batch, because it
        would wait for that step, too.
        """
        if self._context.steps.running and self._steps_are_long and self._one_joins_next:
            return ()
        return self._turns.next(self._schedule)

    @property
    def _steps_are_long(self) -> bool:
        return self._context.speed_learner.last_seconds >= _LONG_STEP_SECONDS

    @property
    def _one_joins_next(self) -> bool:
        return self.computing.completes_one or self._newcomers.join_next

    def _schedule(self, alone: bool) -> Sequence[Scheduled[RequestT]]:
        generating = self._running.schedule(alone=alone)
        if self._running.waits_for_room or (alone and generating) or not self.computing:
            return generating
        tokens = self._most_prompt_tokens(generating)
        return [*generating, *self.computing.schedule(tokens, alone=alone)]

    def _most_prompt_tokens(self, generating: Sequence[Scheduled[RequestT]]) -> int:
        """Compute how many prompt tokens a step may compute beside requests that generate."""
        if not self._one_generates_soon():
            return self._chunk_tokens
        rows = len(generating)
        most = max(self._chunk_tokens - rows, self._chunk_tokens // _PROMPT_SHARE, 1)
        work = StepWork(rows=rows, row_pairs=sum([r.request.num_tokens for r in generating]))
        backlog = self.computing.backlog_tokens if rows else _ANY_BACKLOG
        computing = self.computing
        return self._itl_target.most_prompt_tokens(
            work, computing.next_context, most, backlog, computing.waiting
        )

    def _one_generates_soon(self) -> bool:
        """Whether a request would wait for the step's end.

        That includes one whose last chunk is in flight, and one that is computed elsewhere now.
        """
        return bool(self._running) or self.computing.completes_one or self._newcomers.are_coming

    def process_step_output(self, item: Scheduled[RequestT], output: StepOutput) -> None:
        """Take the tokens of a request that generates, or a chunk of its prompt."""
        request = item.request
        if item is request.every_step:
            self._running.process_step_output(request, output)
            return
        self.computing.process_step_output(item, output)
        if item.sample:
            run = self.computing.remove(request)
            assert run is not None
            self._begin_to_generate(request, run, output.tokens)

    def remove(self, request: RequestT) -> None:
        """Stop computing a request, whatever phase it is in; its memory stays."""
        self.computing.remove(request)
        self._running.remove(request)

    def _begin_to_generate(
        self, request: RequestT, run: PromptRun, tokens: Sequence[SampledToken]
    ) -> None:
        """Emit the first token of each choice of a computed prompt, and continue from there."""
        request.activate(run.timings())
        known = request.output_ids
        ends = [request.checker.again(known).check(token.token_id) for token in tokens]
        for choice, token, finish in zip(request.choices, tokens, ends, strict=True):
            self._context.emit(
                request,
                [token],
                finish,
                request.input_timings,
                choice=choice,
                index=len(known),
                # When it begins again it finds its own pages.
                cached_tokens=0 if known else run.cached_tokens,
            )
        firsts = zip(request.choices, tokens, ends, strict=True)
        live = [(choice, token.token_id) for choice, token, finish in firsts if finish is None]
        if live:
            fork_and_run(self._context, self._running, self._growth, request, live)
        else:
            self._context.release(request, Outcome.FINISHED, None)
