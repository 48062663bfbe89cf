"""The scheduler of a decode worker: grant and pull, or compute; activate, generate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias, assert_never

from tokenizers import Tokenizer

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.grants import Grants
from kvrelay.decode_worker.hand_over_stream import (
    ConnectAnew,
    HandOverStream,
    OpenStream,
    PeerMessage,
    PeerProbed,
    StreamLost,
)
from kvrelay.decode_worker.hand_overs import HandOvers
from kvrelay.decode_worker.lent_histories import LentHistories
from kvrelay.decode_worker.pulls import PagesHashed, PullEnded, Pulls
from kvrelay.decode_worker.readable_hosts import ReadableHosts
from kvrelay.decode_worker.request import (
    AgentReadable,
    DecodeRequest,
    HandedOverRequest,
    LentHashed,
)
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.step import Scheduled, StepOutput
from kvrelay.engine.executor.stop import StopChecker
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.commands import Mailbox, Submit, Wake
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.metrics import TRANSFER_REFUSALS
from kvrelay.engine.scheduler.outbox import Sink
from kvrelay.engine.scheduler.periodic_check import CHECKS_IN_TIMEOUT, PeriodicCheck
from kvrelay.engine.scheduler.suspects import alone_until, failed_end
from kvrelay.kv_transfer.hand_over.decode_side import DecodeHandOver
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.kv_transfer.transfers import MOST_DEAD, Transfers
from kvrelay.mem_cache.release import Outcome
from kvrelay.wire.hand_over import Heartbeat
from kvrelay.wire.load import PeerTransport, WorkerLoad
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd
from kvrelay.wire.request_progress import RequestProgress
from kvrelay.wire.submit import CancelRequest


class Heartbeats:
    """The heartbeats to the prefill workers that requests wait for.

    Args:
        context: the worker's requests.
        requests: sends the heartbeats, and ends requests.
        pulls: knows the reads that do not end.
        timeout: seconds after which a silent prefill worker is given up.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        pulls: Pulls,
        timeout: float,
    ) -> None:
        self._context = context
        self._requests = requests
        self._pulls = pulls
        self._timeout = timeout
        self.check = PeriodicCheck(timeout / CHECKS_IN_TIMEOUT)
        """The timer of the heartbeats."""

    def send_or_give_up(self) -> None:
        """Send heartbeats if they are due, and fail requests whose peer or read takes too long.

        A prefill worker answers each heartbeat, so one that has been silent for long is lost. A
        stream that is not open yet waits for a handshake, which has time-outs of its own.
        """
        now = time.monotonic()
        if not self.check.is_due(now):
            return
        for request in list(self._context.requests.values()):
            if not isinstance(request, HandedOverRequest) or not request.stream.is_open:
                continue
            if request.hand_over.state is DecodeState.VALID:
                continue
            if now - request.stream.sequencer.heard_at > self._timeout:
                error = f"{request.peer} was silent for {self._timeout:g} s"
                self._requests.fail(request, FailureReason.PEER_LOST, error)
            elif not self._pulls.fail_if_stuck(request, now):
                self._requests.send(request, Heartbeat())


DecodeMessage: TypeAlias = (
    PullEnded | PagesHashed | PeerMessage | StreamLost | PeerProbed | AgentReadable | LentHashed
)
"""The messages of the decode scheduler, beside the commands that every scheduler takes."""

_COMPUTES_NO_PROMPTS = "this decode worker was started with --placement disaggregated"


class DecodeScheduler:
    """The `Scheduler` of a decode worker: takes prompts over, or computes them, and generates.

    A request waits without memory until its prefill worker asks for it. Then it reserves its whole
    prompt, if the expected growth of others still fits beside it. It pulls pages as they are
    announced. It is activated when the prefill side confirms that it held them all along, and then
    gains tokens step by step.

    If memory runs short after all, the request with the least to lose is retracted, and its router
    submits it again.

    A request without a prefill worker waits in the same queue and reserves as much at once. It is
    computed here, chunk by chunk, beside those that generate.

    ``DecodeScheduler`` uses ``Grants``, ``HandOvers`` and ``Heartbeats``. The latter two and the
    scheduler itself use ``Pulls``. All use ``DecodeRequests``, never the other way round.

    Args:
        context: the worker's memory, requests and outputs.
        agent: reads the prefill workers' pools.
        client: opens hand-over streams.
        inbox: where reads and hashes report their end.
        tokenizer: for stop strings.
        config: bounds of the growth reserve and of a step, drafts, tests' forced retractions.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        agent: Transfers,
        client: Sink[OpenStream | ConnectAnew],
        inbox: Mailbox[PullEnded | PagesHashed | AgentReadable | LentHashed | Wake],
        tokenizer: Tokenizer,
        config: WorkerConfig,
    ) -> None:
        self._context = context
        self._agent = agent
        agent.watch_fences(lambda: inbox.post(Wake()))
        self._client = client
        self._tokenizer = tokenizer
        self._config = config
        self._growth = GrowthReserve(
            context.kv_cache, config.growth_min, config.growth_max, config.tokens_in_flight - 1
        )
        timeout = config.worker_timeout
        self._requests = DecodeRequests(context, self._growth, config)
        self._running = self._requests.running
        self._steps = self._requests.steps
        self._probes: dict[str, PeerTransport] = {}
        """The latest probe of each prefill worker that lives."""
        self._histories = LentHistories(
            context,
            self._requests,
            agent,
            inbox,
            self._probes,
            config.min_transfer_gigabytes_per_second * 1e9,
        )
        self._hosts = ReadableHosts()
        self._grants = Grants(
            context,
            self._requests,
            self._growth,
            config.bypass_limit,
            config.grants_ahead,
            config.prefix_wait,
            self._histories,
            self._hosts,
        )
        self._pulls = Pulls(
            context,
            self._requests,
            agent,
            client,
            inbox,
            config.verify_pages,
            timeout,
            self._hosts,
        )
        self._hand_overs = HandOvers(
            context, self._requests, self._pulls, self._growth, self._histories
        )
        self.heartbeats = Heartbeats(context, self._requests, self._pulls, timeout)
        self._dead: deque[str] = deque(maxlen=MOST_DEAD)
        """Dead prefill workers, for which a late probe may still be reported."""

    def submit(self, command: Submit) -> None:
        """Queue a new request, until its prefill worker asks or there is room to compute it."""
        request = self._make(command)
        if not self._context.register(request, request.most_tokens):
            return
        if command.submission.prefill is None and not self._config.computes_prompts:
            refused = RequestEnd(EndReason.FAILED, error=_COMPUTES_NO_PROMPTS)
            self._context.release(request, Outcome.FAILED, refused)
            return
        if isinstance(request, HandedOverRequest):
            self._histories.expect(request)
            self._context.outbox.put(self._client, OpenStream(request.stream))
        else:
            self._grants.prefetch(request)
        request.enter(Phase.QUEUED)

    def cancel(self, command: CancelRequest) -> None:
        """End a request, all choices of it, and free its memory."""
        for request in self._context.choices_of(command.key):
            self._requests.end_early(request, Outcome.ABORTED, RequestEnd(EndReason.ABORTED))

    def peer_died(self, incarnation: str) -> None:
        """Let fences on reads from a dead prefill worker pass. Its streams end by themselves."""
        self._dead.append(incarnation)
        self._probes.pop(incarnation, None)
        self._agent.confirm_death(incarnation)

    def handle(self, message: DecodeMessage) -> None:
        """Take a message of a hand-over stream or a read."""
        match message:
            case PullEnded():
                self._pulls.pull_ended(message)
            case PagesHashed():
                self._pulls.pages_hashed(message)
            case PeerMessage():
                self._hand_overs.receive(message)
            case StreamLost():
                self._hand_overs.stream_lost(message)
            case AgentReadable():
                self._histories.readable(message)
            case LentHashed():
                self._histories.compare(message)
            case PeerProbed():
                self._record_probe(message.transport)
            case _:
                assert_never(message)

    def watch_peers(self) -> None:
        """Send due heartbeats, and fail requests whose peer, or read, takes too long."""
        self.heartbeats.send_or_give_up()

    def admit(self) -> None:
        """Reserve memory for the requests that prefill workers have asked for, and grant it."""
        self._grants.reserve_and_grant()
        self._histories.serve()

    def schedule(self) -> Sequence[Scheduled[DecodeRequest]]:
        """Allocate the next token of all requests that generate, and prompt chunks beside them."""
        return self._steps.schedule()

    def process_step_output(self, item: Scheduled[DecodeRequest], output: StepOutput) -> None:
        """Take the tokens of a request that generates, or a chunk of its prompt."""
        self._steps.process_step_output(item, output)

    def fail(self, request: DecodeRequest, error: Exception) -> None:
        """End a request because its forward has failed."""
        self._requests.end_early(request, Outcome.FAILED, failed_end(error))

    def retract_for_drain(self) -> None:
        """Retract all requests, whatever phase they are in."""
        for request in list(self._context.requests.values()):
            outcome = Outcome.RETRACTED if request.every_step else Outcome.ABORTED
            self._requests.end_early(request, outcome, RequestEnd(EndReason.RETRACTED))

    def load(self) -> WorkerLoad:
        """Count requests, prompt tokens that are not here yet, and expected growth.

        Tokens that are expected to be cached take room, but need not be computed.
        """
        requests = self._context.requests.values()
        to_read = [r.input_len for r in requests if r.peer and not r.kv_written_len]
        waiting = [r for r in requests if not r.peer and r.wants_memory]
        to_hold = [r.input_len for r in waiting]
        uncached = {r: r.input_len - r.expected_cached_len for r in waiting}
        left = self._steps.computing.tokens_left
        return self._context.measure_load(
            waiting_requests=len(requests) - len(self._running),
            waiting_tokens=sum(to_read) + sum(to_hold) + sum(left.values()),
            growth_tokens=self._growth.total_tokens(self._running),
            output_tokens=self._growth.mean_output_tokens,
            prompts=uncached | left,
            peers=self._probes.values(),
        )

    def progress(self) -> Iterator[tuple[DecodeRequest, RequestProgress]]:
        """Yield how far each request has come: what was read, computed and generated."""
        shape = self._context.kv_cache.shape
        for request in self._context.requests.values():
            pages = shape.pages_for(request.input_len)
            yield request, request.progress(pages, shape.page_size)

    def _record_probe(self, probe: PeerTransport) -> None:
        before = self._probes.get(probe.incarnation)
        if probe.refusal and not (before and before.refusal):
            self._context.metrics.count(TRANSFER_REFUSALS)
            self._context.tell_load()
        self._hosts.note_probe(probe)
        if probe.incarnation not in self._dead:
            self._probes[probe.incarnation] = self._histories.with_speed(probe)

    def _make(self, command: Submit) -> DecodeRequest:
        submission = command.submission
        params = submission.sampling_params
        checker = StopChecker(params.stops, self._tokenizer, submission.emitted_ids)
        num_drafts = self._config.drafts_for(params.speculate)
        alone = alone_until(submission, self._config)
        if submission.prefill is None:
            return DecodeRequest.of(
                command,
                faults=self._context.faults,
                checker=checker,
                num_drafts=num_drafts,
                alone_until=alone,
            )
        shape = self._context.kv_cache.shape
        pages = shape.pages_for(len(submission.input_ids))
        return HandedOverRequest.of(
            command,
            faults=self._context.faults,
            stream=HandOverStream(command.key, submission.prefill),
            hand_over=DecodeHandOver(pages, shape.windowed, params.n),
            checker=checker,
            num_drafts=num_drafts,
            alone_until=alone,
        )
