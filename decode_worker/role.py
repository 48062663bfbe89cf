"""What a decode worker does next: grant, pull, activate, generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.decode_worker.stream import FromPeer, HandOverClient, HandOverStream, Leave, StreamLost
from kvrelay.engine.commands import Cancel, Inbox, PeerDied, Submit, Wake
from kvrelay.engine.core import EngineCore
from kvrelay.engine.outputs import End, EndReason, Load
from kvrelay.engine.request import Request
from kvrelay.engine.step import Scheduled
from kvrelay.engine.stop import Finish, StopChecker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Ask,
    DecodeHandOver,
    DecodeState,
    Ended,
    FromPrefill,
    Released,
)
from kvrelay.kv_transfer.hand_over import (
    EndReason as HandOverEnd,
)
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.release import Outcome
from kvrelay.model_runner.sampler import SampledToken

BYPASS_LIMIT = 16
"""Requests that may be let in before one that came earlier and does not fit yet."""


@dataclass(frozen=True, slots=True)
class PullEnded:
    """A read of a request's pages has ended, well or not."""

    stream: HandOverStream
    pull: Pull


class DecodeRole:
    """Takes prompts over and generates. See `engine.loop.Role`.

    A request waits (no memory), is asked for by its prefill worker, reserves
    its whole prompt and the promise of its output, pulls pages as they are
    announced, is activated when the prefill side confirms that it held them
    all along, and then gains a token a step.

    Args:
        core: the worker's memory, requests and outputs.
        agent: reads the prefill workers' pools.
        client: opens hand-over streams.
        inbox: where reads report their end.
        tokenizer: for stop strings.
    """

    def __init__(
        self,
        core: EngineCore,
        agent: TransferAgent,
        client: HandOverClient,
        inbox: Inbox,
        tokenizer: Tokenizer,
    ) -> None:
        self._core = core
        self._agent = agent
        self._client = client
        self._inbox = inbox
        self._tokenizer = tokenizer
        self._running: list[DecodeRequest] = []

    # What arrives

    def submit(self, command: Submit) -> None:
        """See `Role`."""
        assert command.prefill is not None, "a decode worker is told who computes the prompt"
        pages = self._core.ledger.pages_for(len(command.prompt_ids))
        request = DecodeRequest(
            key=command.key,
            link=command.link,
            prompt_ids=command.prompt_ids,
            sampling=command.sampling,
            stops=command.stops,
            priority=command.priority,
            stream=HandOverStream(command.key, command.prefill),
            hand_over=DecodeHandOver(pages, self._core.ledger.windowed),
            checker=StopChecker(command.stops, self._tokenizer),
        )
        if self._core.admit(request, request.most_tokens):
            self._core.outbox.put(self._client, request.stream)

    def cancel(self, command: Cancel) -> None:
        """See `Role`."""
        request = self._core.requests.get(command.key)
        if isinstance(request, DecodeRequest):
            self._leave(request, Outcome.ABORTED, End(EndReason.ABORTED))

    def handle(self, message: object) -> None:
        """See `Role`."""
        match message:
            case PullEnded():
                self._core.metrics.count_pull(message.pull)
                request = self._live(message.stream)
                if request is not None:
                    self._read_ended(request, message.pull)
            case FromPeer():
                request = self._live(message.stream)
                if request is not None:
                    self._listen(request, message.message)
            case StreamLost():
                request = self._live(message.stream)
                if request is not None and request.hand_over.state is not DecodeState.VALID:
                    self._fail(request, f"hand-over from {message.stream.peer}: {message.detail}")
            case PeerDied():
                self._agent.confirm_death(message.incarnation, lambda: self._inbox.post(Wake()))

    # What to do next

    def admit(self) -> None:
        """See `Role`: grant what was asked for, in order; a misfit is passed a bounded time."""
        misfit: DecodeRequest | None = None
        for request in sorted(self._asked(), key=lambda r: r.turn):
            if misfit is not None and misfit.bypassed >= BYPASS_LIMIT:
                return
            if not self._reserve(request):
                misfit = misfit or request
                continue
            if misfit is not None:
                misfit.bypassed += 1
            # What the prefix index has here already, and what no window needs, is not read.
            protected = request.held.num_protected_pages
            missing = [max(first, protected) for first in request.held.first_pages]
            self._core.outbox.put(request.stream, request.hand_over.grant(missing))

    def schedule(self) -> Sequence[Scheduled]:
        """See `Role`: one token for every running request."""
        leases = [request.held for request in self._running]
        self._core.ledger.slide_all(leases, [lease.kv_committed_len for lease in leases])
        grown = self._core.ledger.grow_all(leases, [r.num_tokens for r in self._running])
        assert grown, "a promise was broken"
        return [Scheduled(request, 1, sample=True) for request in self._running]

    def settled(self, item: Scheduled, token: SampledToken | None) -> None:
        """See `Role`: say the token, and whether it was the last."""
        request = item.request
        assert isinstance(request, DecodeRequest)
        assert token is not None
        request.output_ids.append(token.token_id)
        finish = request.checker.check(token.token_id)
        if finish is None:
            self._core.emit(request, [token])
        else:
            self._finish(request, token, finish)

    def failed(self, request: Request, error: Exception) -> None:
        """See `Role`."""
        assert isinstance(request, DecodeRequest)
        end = End(EndReason.FAILED, error=f"the forward failed: {error}")
        self._leave(request, Outcome.ABORTED, end)

    def load(self) -> Load:
        """See `Role`."""
        running = len(self._running)
        waiting = (r for r in self._core.requests.values() if not r.output_ids)
        return Load(
            waiting_requests=len(self._core.requests) - running,
            running_requests=running,
            waiting_tokens=sum(len(r.prompt_ids) for r in waiting),
            pools=self._core.ledger.counts(),
        )

    # The hand-over

    def _listen(self, request: DecodeRequest, message: FromPrefill) -> None:
        try:
            match message:
                case Ask():
                    request.hand_over.on_ask()
                case Announce():
                    self._pull(request, message)
                case Released():
                    self._activate(request, message)
                case Ended():
                    self._prefill_ended(request, message)
        except ProtocolError as error:
            self._fail(request, str(error))

    def _pull(self, request: DecodeRequest, message: Announce) -> None:
        """Read the announced pages straight into the reserved ones."""
        wanted = request.hand_over.on_announce(message)
        if request.hand_over.first_token is not None:
            request.announced_at = time.monotonic()
        if any(run.page_ids for run in wanted):
            stream = request.stream
            pull = self._agent.pull(
                stream.peer.incarnation,
                [
                    request.held.pages(pool)[run.first_page : run.end].astype(np.int64)
                    for pool, run in enumerate(wanted)
                ],
                [np.asarray(run.page_ids, np.int64) for run in wanted],
                lambda pull: self._inbox.post(PullEnded(stream, pull)),
            )
            request.pulls.append(pull)
        self._say_done(request)

    def _read_ended(self, request: DecodeRequest, pull: Pull) -> None:
        if pull.state is not PullState.DONE:
            self._fail(request, f"read from {pull.peer} failed: {pull.error}")
            return
        request.hand_over.on_read()
        self._say_done(request)

    def _say_done(self, request: DecodeRequest) -> None:
        done = request.hand_over.done()
        if done is not None:
            self._core.outbox.put(request.stream, done)

    def _activate(self, request: DecodeRequest, message: Released) -> None:
        """The prefill side has confirmed: the prompt's KV is here, and is what it should be."""
        if not request.hand_over.on_released(message):
            self._fail(request, "the prefill side let go of pages while they were read")
            return
        assert request.hand_over.first_token is not None
        request.activated_at = time.monotonic()
        self._core.outbox.put(request.stream, Leave())
        self._core.ledger.commit(request.held, len(request.prompt_ids))
        request.output_ids.append(request.hand_over.first_token)
        request.checker.check(request.hand_over.first_token)
        self._running.append(request)

    def _prefill_ended(self, request: DecodeRequest, message: Ended) -> None:
        if message.reason is HandOverEnd.FAILED:
            self._fail(request, f"the prefill side failed: {message.detail}")
        else:
            self._leave(request, Outcome.ABORTED, End(EndReason.ABORTED))

    # The ways out

    def _finish(self, request: DecodeRequest, token: SampledToken, finish: Finish) -> None:
        self._running.remove(request)
        self._core.end(
            request,
            Outcome.FINISHED,
            End(EndReason.FINISHED, finish),
            tokens=[token],
            timings=request.timings(),
        )

    def _fail(self, request: DecodeRequest, error: str) -> None:
        self._leave(request, Outcome.ABORTED, End(EndReason.FAILED, error=error, retryable=True))

    def _leave(self, request: DecodeRequest, outcome: Outcome, end: End) -> None:
        """End a request early, wherever it is; its running reads still fence its pages."""
        if request in self._running:
            self._running.remove(request)
        self._core.outbox.put(request.stream, Leave())
        self._core.end(request, outcome, end, timings=request.timings(), fences=request.pulls)

    # Memory

    def _reserve(self, request: DecodeRequest) -> bool:
        """The whole prompt, but for what the prefix index has, and the promise of its output."""
        prompt = len(request.prompt_ids)
        if not self._core.reserve(request, request.most_tokens, known_tokens=prompt):
            return False
        self._core.ledger.slide(request.held, prompt)
        grown = self._core.ledger.grow(request.held, prompt)
        assert grown, "a promise was broken"
        return True

    def _asked(self) -> list[DecodeRequest]:
        return [
            request
            for request in self._core.requests.values()
            if isinstance(request, DecodeRequest) and request.hand_over.state is DecodeState.ASKED
        ]

    def _live(self, stream: HandOverStream) -> DecodeRequest | None:
        """The request that `stream` belongs to, unless it has ended."""
        request = self._core.requests.get(stream.key)
        if isinstance(request, DecodeRequest) and request.stream is stream:
            return request
        return None
