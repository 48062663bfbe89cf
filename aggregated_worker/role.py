"""Prefill and decode in one worker: what runs next, in batches of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from kvrelay.engine.admission import admit_in_turn
from kvrelay.engine.commands import Cancel, Submit
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.faults import Phase
from kvrelay.engine.growth import GrowthReserve
from kvrelay.engine.outputs import NO_TIMINGS, End, EndReason, Load, Timings
from kvrelay.engine.prompts import ComputingPrompts, PromptRun
from kvrelay.engine.request import Request
from kvrelay.engine.running import GeneratingRequest, RunningBatch
from kvrelay.engine.step import Computed, Scheduled
from kvrelay.engine.stop import StopChecker
from kvrelay.mem_cache.release import Outcome
from kvrelay.model_runner.sampler import SampledToken

_PROMPT_SHARE = 4
"""A step computes at least this part of its token budget of prompts, however many generate."""


@dataclass(eq=False, slots=True, kw_only=True)
class AggregatedRequest(GeneratingRequest):
    """A prompt to compute and to continue."""

    submission: Submit
    """Where it begins again, if it has to make room."""
    prompt_timings: Timings = NO_TIMINGS
    activated_at: float = 0.0

    def timings(self) -> Timings:
        """What it took until now."""
        if not self.activated_at:
            return self.prompt_timings
        return replace(self.prompt_timings, decode=time.monotonic() - self.activated_at)


class AggregatedRole:
    """Computes prompts and generates. See `engine.loop.Role`.

    The baseline: the same loop, batches and memory without a hand-over. Who
    has to make room waits here again, before everything that came later.

    Args:
        core: the worker's memory, requests and outputs.
        tokenizer: for stop strings.
        config: the token budget of a step, bounds of the growth reserve, drafts.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, config: WorkerConfig) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._config = config
        self._growth = GrowthReserve(
            core.ledger, config.growth_min, config.growth_max, config.tokens_in_flight - 1
        )
        self._waiting: list[AggregatedRequest] = []
        self._computing: ComputingPrompts[AggregatedRequest] = ComputingPrompts(core)
        self._running: RunningBatch[AggregatedRequest] = RunningBatch(
            core, self._growth, self._retract, retract_every=config.debug_retract_every
        )

    # What arrives

    def submit(self, command: Submit) -> None:
        """See `Role`."""
        request = self._make(command)
        if self._core.admit(request, request.most_tokens):
            self._waiting.append(request)
            self._core.faults.reach(Phase.QUEUED)

    def cancel(self, command: Cancel) -> None:
        """See `Role`."""
        for request in self._core.choices_of(command.key):
            assert isinstance(request, AggregatedRequest)
            self._leave(request, End(EndReason.ABORTED))

    def handle(self, message: object) -> None:
        """See `Role`: there are no peers."""

    # What to do next

    def admit(self) -> None:
        """See `Role`."""
        if not self._waiting:
            return
        limit = self._config.bypass_limit
        for request in admit_in_turn(self._core.ledger, self._waiting, self._reserve, limit):
            self._waiting.remove(request)

    def _reserve(self, request: AggregatedRequest) -> bool:
        growing = [*self._running, *self._computing]
        return self._computing.reserve(request, self._growth.leaving(request, growing))

    def schedule(self) -> Sequence[Scheduled]:
        """See `Role`: the next token of all that generate, and prompts with what is left."""
        generating = self._running.schedule()
        if self._running.waits_for_room:
            return generating
        budget = self._config.chunk_tokens
        budget = max(budget - len(generating), budget // _PROMPT_SHARE, 1)
        return [*generating, *self._computing.schedule(budget)]

    def settled(self, item: Scheduled, computed: Computed) -> None:
        """See `Role`."""
        request = item.request
        assert isinstance(request, AggregatedRequest)
        if item is request.every_step:
            self._running.settled(request, computed)
            return
        self._computing.settled(request, item, computed)
        if item.sample:
            run = self._computing.leave(request)
            assert run is not None
            self._begin(request, run, computed.tokens)

    def failed(self, request: Request, error: Exception) -> None:
        """See `Role`."""
        assert isinstance(request, AggregatedRequest)
        self._leave(request, End(EndReason.FAILED, error=f"the forward failed: {error}"))

    def hand_back(self) -> None:
        """See `Role`: all of them, wherever they are."""
        for request in list(self._core.requests.values()):
            assert isinstance(request, AggregatedRequest)
            self._leave(request, End(EndReason.RETRACTED), Outcome.RETRACTED)

    def load(self) -> Load:
        """See `Role`."""
        return Load(
            waiting_requests=len(self._waiting),
            running_requests=len(self._core.requests) - len(self._waiting),
            waiting_tokens=sum([r.input_len for r in self._waiting]) + self._computing.tokens_left,
            pools=self._core.ledger.counts(),
            growth_tokens=self._growth.total_tokens(self._running),
            step_seconds=self._core.step_seconds,
        )

    # The ways on and out

    def _begin(
        self, request: AggregatedRequest, run: PromptRun, tokens: Sequence[SampledToken]
    ) -> None:
        """The prompt is computed: say the first token of each choice, and continue from it."""
        request.prompt_timings = run.timings()
        request.activated_at = time.monotonic()
        known = request.output_ids
        ends = [request.checker.again(known).check(token.token_id) for token in tokens]
        for choice, token, finish in zip(request.choices, tokens, ends, strict=True):
            self._core.emit(
                request,
                [token],
                None if finish is None else End(EndReason.FINISHED, finish),
                request.prompt_timings,
                choice=choice,
                index=len(known),
                # When it begins again it finds its own pages.
                cached_tokens=0 if known else run.cached_tokens,
                prompt_logprobs=run.scores if choice == request.choices[0] else (),
            )
        firsts = zip(request.choices, tokens, ends, strict=True)
        live = [(choice, token.token_id) for choice, token, finish in firsts if finish is None]
        if live:
            self._running.begin(request, live)
        else:
            self._core.end(request, Outcome.FINISHED, None)

    def _retract(self, request: AggregatedRequest) -> None:
        """Wait again, before everything that came later, with what was generated as input.

        Elsewhere, if no more requests are taken here.
        """
        if self._core.draining:
            self._leave(request, End(EndReason.RETRACTED), Outcome.RETRACTED)
            return
        self._core.end(request, Outcome.RETRACTED, None)
        again = self._make(
            replace(
                request.submission,
                key=request.key,
                input_ids=tuple(request.token_ids(0, request.num_tokens)),
                choices=(request.key.choice,),
            )
        )
        self._core.requests[again.key] = again
        self._waiting.append(again)

    def _leave(
        self, request: AggregatedRequest, end: End, outcome: Outcome = Outcome.ABORTED
    ) -> None:
        """End a request early, wherever it is."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._computing.leave(request)
        self._running.leave(request)
        self._core.end(request, outcome, end, timings=request.timings())

    def _make(self, command: Submit) -> AggregatedRequest:
        emitted = command.input_ids[command.prompt_len :]
        return AggregatedRequest.of(
            command,
            submission=command,
            checker=StopChecker(command.stops, self._tokenizer, emitted),
            num_drafts=self._config.drafts_for(command.speculate),
        )
