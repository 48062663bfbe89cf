"""The scheduler of an aggregated worker, which computes prompts and generates, in mixed steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Never, assert_never

from tokenizers import Tokenizer

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.executor.stop import StopChecker
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.admit_in_turn import AdmissionInTurn
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.itl_target import ItlTarget
from kvrelay.engine.scheduler.mixed_steps import MixedSteps
from kvrelay.engine.scheduler.prefix_waits import PrefixWaits
from kvrelay.engine.scheduler.running_batch import GeneratingRequest, RunningBatch
from kvrelay.engine.scheduler.suspects import alone_until, failed_end
from kvrelay.engine.scheduler.tier_loads import TierLoads
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import EndReason, RequestEnd
from kvrelay.wire.request_progress import RequestProgress
from kvrelay.wire.submit import CancelRequest


@dataclass(eq=False, slots=True, kw_only=True)
class AggregatedRequest(GeneratingRequest):
    """A request whose prompt this worker computes and continues."""


class AggregatedScheduler:
    """The `Scheduler` of an aggregated worker, which computes prompts and generates.

    It is the baseline: the same loop, batches and memory without a hand-over. A retracted request
    waits here again, before all requests that came later.

    Args:
        context: the worker's memory, requests and outputs.
        tokenizer: for stop strings.
        config: the token budget of a step, bounds of the growth reserve, drafts.
    """

    def __init__(
        self,
        context: SchedulerContext[AggregatedRequest],
        tokenizer: Tokenizer,
        config: WorkerConfig,
    ) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._config = config
        self._growth = GrowthReserve(
            context.kv_cache, config.growth_min, config.growth_max, config.tokens_in_flight - 1
        )
        self._waiting: list[AggregatedRequest] = []
        self._waits = PrefixWaits(
            context, config.prefix_wait, lambda r: r.every_step is None, at_end=lambda _: False
        )
        self._loads = TierLoads(context)
        self._admission = AdmissionInTurn(context, self._reserve, config.bypass_limit)
        self._running: RunningBatch[AggregatedRequest] = RunningBatch(
            context, self._growth, self._release_retracted, retract_every=config.debug_retract_every
        )
        itl_target = ItlTarget(config.latency_targets, context.speed_learner, own_prompts=True)
        self._steps: MixedSteps[AggregatedRequest] = MixedSteps(
            context, self._running, self._growth, itl_target, config.chunk_tokens
        )
        self._computing = self._steps.computing

    def submit(self, command: Submit) -> None:
        """Let a new request wait for memory."""
        request = self._make(command)
        if self._context.register(request, request.most_tokens):
            self._waiting.append(request)
            self._loads.prefetch(request, request.reusable_len)
            request.enter(Phase.QUEUED)

    def cancel(self, command: CancelRequest) -> None:
        """End a request, all choices of it, and free its memory."""
        for request in self._context.choices_of(command.key):
            self._end_early(request, RequestEnd(EndReason.ABORTED))

    def peer_died(self, incarnation: str) -> None:
        """Do nothing: an aggregated worker has no peers."""

    def handle(self, message: Never) -> None:
        """Take nothing: there are no messages beside the commands."""
        assert_never(message)

    def watch_peers(self) -> None:
        """Do nothing: an aggregated worker has no peers."""

    def admit(self) -> None:
        """Reserve memory for waiting requests, in turn."""
        if not self._waiting:
            return
        for request in self._admission.admit(self._waiting, must_wait=self._must_wait):
            self._waiting.remove(request)

    def _must_wait(self, request: AggregatedRequest) -> bool:
        """Whether another request computes its prefix, or a lower tier brings it back."""
        if self._waits.must_wait(request, request.reusable_len, self._computing):
            return True
        return self._loads.must_wait(request, request.reusable_len, lambda: self._headroom(request))

    def _reserve(self, request: AggregatedRequest) -> bool:
        return self._computing.reserve_and_add(request, self._headroom(request))

    def _headroom(self, request: AggregatedRequest) -> Sequence[int] | None:
        return self._growth.headroom(request, [*self._running, *self._computing])

    def schedule(self) -> Sequence[Scheduled[AggregatedRequest]]:
        """Allocate the next token of all requests that generate, and prompt chunks beside them."""
        return self._steps.schedule()

    def process_step_output(self, item: Scheduled[AggregatedRequest], output: StepOutput) -> None:
        """Take the tokens of a request that generates, or a chunk of its prompt."""
        self._steps.process_step_output(item, output)

    def fail(self, request: AggregatedRequest, error: Exception) -> None:
        """End a request because its forward has failed."""
        self._end_early(request, failed_end(error), Outcome.FAILED)

    def retract_for_drain(self) -> None:
        """Retract all requests, whatever phase they are in."""
        for request in list(self._context.requests.values()):
            self._end_early(request, RequestEnd(EndReason.RETRACTED), Outcome.RETRACTED)

    def load(self) -> WorkerLoad:
        """Count requests, prompt tokens that are not computed, and expected growth.

        Tokens that are expected to be cached take room, but need not be computed.
        """
        left = self._computing.tokens_left
        to_hold = [request.input_len for request in self._waiting]
        uncached = {r: r.input_len - r.expected_cached_len for r in self._waiting}
        return self._context.measure_load(
            waiting_requests=len(self._waiting),
            waiting_tokens=sum(to_hold) + sum(left.values()),
            prompts=uncached | left,
            growth_tokens=self._growth.total_tokens(self._running),
            output_tokens=self._growth.mean_output_tokens,
        )

    def progress(self) -> Iterator[tuple[AggregatedRequest, RequestProgress]]:
        """Yield how far each request has come."""
        shape = self._context.kv_cache.shape
        for request in self._context.requests.values():
            pages = shape.pages_for(request.input_len)
            yield request, request.progress(pages, shape.page_size)

    def _release_retracted(self, request: AggregatedRequest) -> None:
        """Free a request's memory and let it wait again, with the tokens that it has generated.

        It goes before all requests that came later. If the worker drains, its router submits it
        elsewhere instead.
        """
        if self._context.draining:
            self._end_early(request, RequestEnd(EndReason.RETRACTED), Outcome.RETRACTED)
            return
        if request.trace is not None:
            request.trace.share()  # for when it waits again
        self._context.release(request, Outcome.RETRACTED, None)
        input_ids = tuple(request.token_ids(0, request.num_tokens))
        submission = request.command.submission.going_on(request.key, input_ids)
        again = self._make(replace(request.command, submission=submission))
        self._context.requests[again.key] = again
        self._waiting.append(again)

    def _end_early(
        self, request: AggregatedRequest, end: RequestEnd, outcome: Outcome = Outcome.ABORTED
    ) -> None:
        """Release a request, whatever phase it is in."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._steps.remove(request)
        self._context.release(request, outcome, end, timings=request.timings())

    def _make(self, command: Submit) -> AggregatedRequest:
        submission = command.submission
        params = submission.sampling_params
        return AggregatedRequest.of(
            command,
            faults=self._context.faults,
            checker=StopChecker(params.stops, self._tokenizer, submission.emitted_ids),
            num_drafts=self._config.drafts_for(params.speculate),
            alone_until=alone_until(submission, self._config),
        )
