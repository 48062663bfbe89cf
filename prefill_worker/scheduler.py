"""The scheduler of a prefill worker: ask, reserve, compute in chunks, announce, release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.executor.stop import StopChecker
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.commands import Mailbox, Submit, Wake
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.prompts_in_progress import PromptRun
from kvrelay.engine.scheduler.suspects import Turns, alone_until, failed_end
from kvrelay.kv_transfer.hand_over.prefill_side import PrefillHandOver
from kvrelay.kv_transfer.transfers import Transfers
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.mem_cache.release import Outcome
from kvrelay.prefill_worker.hand_overs import HandOvers
from kvrelay.prefill_worker.histories import Histories
from kvrelay.prefill_worker.prompt_queue import PromptQueue
from kvrelay.prefill_worker.request import (
    HistoryHashed,
    HistoryRead,
    PagesHashed,
    PrefillMessage,
    PrefillRequest,
)
from kvrelay.prefill_worker.sending import send
from kvrelay.wire.hand_over import FirstToken, HandOverEnd
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd, SampledToken
from kvrelay.wire.request_progress import RequestPhase, RequestProgress
from kvrelay.wire.submit import CancelRequest


class PrefillScheduler:
    """The `Scheduler` of a prefill worker.

    A request waits without memory, and asks its decode worker for memory there. Once that is
    granted, it reserves its whole prompt here and computes it chunk by chunk. It keeps it, locked,
    until its hand-over stream ends.

    ``PrefillScheduler`` uses ``HandOvers`` (the streams), and both use ``PromptQueue`` (memory),
    never the other way round.

    Args:
        context: the worker's memory, requests and outputs.
        agent: makes progress for peers' reads while there may be any.
        inbox: where reads and hashes of pages report their end.
        tokenizer: for stop strings.
        config: the token budget of a step, and how many may pass one that does not fit.
    """

    def __init__(
        self,
        context: SchedulerContext[PrefillRequest],
        agent: Transfers,
        inbox: Mailbox[PagesHashed | HistoryRead | HistoryHashed | Wake],
        tokenizer: Tokenizer,
        config: WorkerConfig,
    ) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._config = config
        self._chunk_tokens = config.chunk_tokens
        self._page_size = context.kv_cache.shape.page_size
        self._turns: Turns[PrefillRequest] = Turns()
        # Pages that are compared may turn out wrong: they are published after the verdict.
        publish = config.verify_pages is VerifyPages.OFF
        self._queue = PromptQueue(
            context,
            agent,
            config.bypass_limit,
            publish=publish,
            prefix_wait=config.prefix_wait,
            begin_load=lambda request: self._histories.begin(request),
        )
        self._histories = Histories(
            context,
            agent,
            inbox,
            config.verify_pages,
            config.worker_timeout,
            self._queue.compute,
            self._fail_for,
        )
        self._agent = agent
        agent.watch_fences(lambda: inbox.post(Wake()))
        self.hand_overs = HandOvers(
            context, self._queue, agent, inbox, config.worker_timeout, self._histories
        )

    def submit(self, command: Submit) -> None:
        """Queue a new request, for a grant of its decode worker and then for memory here."""
        request = PrefillRequest.of(
            command,
            faults=self._context.faults,
            hand_over=PrefillHandOver(self._context.kv_cache.shape.windowed),
            alone_until=alone_until(command.submission, self._config),
        )
        # Here one request stands for all of its choices, under the key of the first.
        request.key = command.key.of_choice(0)
        if not self._context.register(request, request.input_len):
            return
        request.stream = self.hand_overs.take_early_stream(request.key)
        self._queue.add(request)
        request.enter(Phase.QUEUED)

    def cancel(self, command: CancelRequest) -> None:
        """End a request, if it still lives, and free its memory."""
        request = self._context.requests.get(command.key.of_choice(0))
        if request is not None:
            self._queue.end_early(request, HandOverEnd.ABORTED, RequestEnd(EndReason.ABORTED))

    def peer_died(self, incarnation: str) -> None:
        """End the requests of a dead decode worker, and let fences on reads from it pass."""
        self._agent.confirm_death(incarnation)
        self._histories.forget(incarnation)
        self.hand_overs.end_streams_of(incarnation)

    def handle(self, message: PrefillMessage) -> None:
        """Take a message of a hand-over stream or a read."""
        self.hand_overs.handle(message)

    def watch_peers(self) -> None:
        """End the requests of silent decode workers."""
        self.hand_overs.end_silent_streams()

    def admit(self) -> None:
        """Reserve memory for granted requests, then ask decode workers for the next grants."""
        self._queue.reserve_granted()
        self._queue.ask_for_grants()

    def schedule(self) -> Sequence[Scheduled[PrefillRequest]]:
        """Allocate the pages of the prompts' next chunks, within the token budget.

        Decode workers are told when a prompt's first chunk is computed.
        """
        computing = self._queue.computing
        scheduled = self._turns.next(
            lambda alone: computing.schedule(self._chunk_tokens, alone=alone)
        )
        for item in scheduled:
            send(self._context, item.request, item.request.hand_over.begin())
        return scheduled

    def process_step_output(self, item: Scheduled[PrefillRequest], output: StepOutput) -> None:
        """Announce the pages that are complete now; with the last chunk, the first tokens too."""
        self._queue.computing.process_step_output(item, output)
        if item.sample:
            self._complete(item.request, output.tokens)
        else:
            self._queue.announce_written_pages(item.request)

    def fail(self, request: PrefillRequest, error: Exception) -> None:
        """End a request because its forward has failed."""
        self._queue.end_early(request, HandOverEnd.FAILED, failed_end(error), Outcome.FAILED)

    def retract_for_drain(self) -> None:
        """Retract the prompts that have not begun. The others finish, hand-over included."""
        for request in list(self._queue.waiting):
            self._queue.end_early(request, HandOverEnd.ABORTED, RequestEnd(EndReason.RETRACTED))

    def load(self) -> WorkerLoad:
        """Count requests and prompt tokens that wait."""
        waiting = self._queue.waiting
        uncached = {r: r.input_len - r.expected_cached_len for r in waiting}
        loading = {
            r: r.input_len - r.load.end_page * self._page_size
            for r in self._context.requests.values()
            if r.load is not None and r.is_loading
        }
        prompts = uncached | loading | self._queue.computing.tokens_left
        return self._context.measure_load(
            waiting_requests=len(waiting), waiting_tokens=sum(prompts.values()), prompts=prompts
        )

    def progress(self) -> Iterator[tuple[PrefillRequest, RequestProgress]]:
        """Yield how far each prompt, and its announcement, has come."""
        pages_for = self._context.kv_cache.shape.pages_for
        for request in self._context.requests.values():
            pages = pages_for(request.input_len)
            everything = request.hand_over.is_announced
            written = pages if everything else request.kv_written_len // self._page_size
            announced = pages if everything else request.hand_over.announced_pages
            phase = RequestPhase.ANNOUNCED if everything else request.shown_phase
            attempt = request.key.attempt
            yield request, RequestProgress(attempt, phase, pages, written, announced)

    def _fail_for(self, request: PrefillRequest, cause: FailureReason, error: str) -> None:
        """End a request for a cause that another attempt may not meet."""
        failed = RequestEnd(EndReason.FAILED, error=error, cause=cause)
        self._queue.end_early(request, HandOverEnd.FAILED, failed)

    def _complete(self, request: PrefillRequest, tokens: Sequence[SampledToken]) -> None:
        """Emit the first tokens of a computed prompt, and announce the rest of the pages.

        If the first tokens end all choices, the request is released instead.
        """
        run = self._queue.computing.remove(request)
        assert run is not None
        first_tokens = []
        for choice, token in zip(request.choices, tokens, strict=True):
            checker = StopChecker(request.params.stops, self._tokenizer, request.output_ids)
            finish = checker.check(token.token_id)
            self._emit_first_token(request, run, choice, token, finish)
            first_tokens.append(FirstToken(token.token_id, finished=finish is not None))
        hand_over, held = request.hand_over, request.held
        if all(first.finished for first in first_tokens):
            send(self._context, request, hand_over.end(HandOverEnd.FINISHED))
            self._queue.release(request, Outcome.FINISHED)
            return
        last = hand_over.announce_last(held.tables(), held.first_pages, first_tokens)
        self._queue.announce(request, last)

    def _emit_first_token(
        self,
        request: PrefillRequest,
        run: PromptRun,
        choice: int,
        token: SampledToken,
        finish: RequestEnd | None,
    ) -> None:
        self._context.emit(
            request,
            [token],
            finish or RequestEnd(EndReason.HANDED_OVER),
            run.timings(),
            index=len(request.output_ids),
            choice=choice,
            cached_tokens=run.cached_tokens,
        )
