"""What a decode worker does next: grant, pull, activate, generate."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.decode_worker.stream import (
    FromPeer,
    HandOverClient,
    HandOverStream,
    Leave,
    PeerAttested,
    StreamLost,
)
from kvrelay.engine.admission import admit_in_turn
from kvrelay.engine.commands import Cancel, Dropped, Inbox, PeerDied, Submit, Wake
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.faults import Phase
from kvrelay.engine.growth import GrowthReserve
from kvrelay.engine.outputs import Cause, End, EndReason, Load
from kvrelay.engine.request import Request
from kvrelay.engine.running import RunningBatch
from kvrelay.engine.step import Computed, Scheduled
from kvrelay.engine.stop import StopChecker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.attestation import Attestation
from kvrelay.kv_transfer.checksums import PageSum, VerifyPages, choose, locate
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Ask,
    Beat,
    DecodeHandOver,
    DecodeState,
    Ended,
    FromDecode,
    FromPrefill,
    Released,
    Said,
)
from kvrelay.kv_transfer.hand_over import (
    EndReason as HandOverEnd,
)
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.release import Outcome

logger = logging.getLogger(__name__)

_SLOWEST_READ = 4
"""Of the time after which a silent peer is given up: what one read may take."""


@dataclass(frozen=True, slots=True)
class PullEnded:
    """A read of a request's pages has ended, well or not."""

    stream: HandOverStream
    pull: Pull


@dataclass(frozen=True, slots=True)
class PagesHashed:
    """What a request has read is ready to be compared."""

    stream: HandOverStream
    sums: tuple[PageSum, ...]


class DecodeRole:
    """Takes prompts over and generates. See `engine.loop.Role`.

    A request waits (no memory), is asked for by its prefill worker, reserves
    its whole prompt while what others are expected to generate still fits
    beside it, pulls pages as they are announced, is activated when the prefill
    side confirms that it held them all along, and then gains tokens step by
    step. If memory runs out after all, the one with the least to lose is given
    back to its router, which submits it again.

    Args:
        core: the worker's memory, requests and outputs.
        agent: reads the prefill workers' pools.
        client: opens hand-over streams.
        inbox: where reads report their end.
        tokenizer: for stop strings.
        config: bounds of the growth reserve, drafts, tests' forced retractions.
    """

    def __init__(
        self,
        core: EngineCore,
        agent: TransferAgent,
        client: HandOverClient,
        inbox: Inbox,
        tokenizer: Tokenizer,
        config: WorkerConfig,
    ) -> None:
        self._core = core
        self._agent = agent
        self._client = client
        self._inbox = inbox
        self._tokenizer = tokenizer
        self._config = config
        self._peer_timeout = config.peer_timeout
        self._next_beat = time.monotonic() + self._peer_timeout / 3
        self._growth = GrowthReserve(
            core.ledger, config.growth_min, config.growth_max, config.tokens_in_flight - 1
        )
        self._running: RunningBatch[DecodeRequest] = RunningBatch(
            core, self._growth, self._retract, retract_every=config.debug_retract_every
        )
        self._peers: dict[str, Attestation] = {}
        self._dead: set[str] = set()

    # What arrives

    def submit(self, command: Submit) -> None:
        """See `Role`."""
        assert command.prefill is not None, "a decode worker is told who computes the prompt"
        ledger = self._core.ledger
        pages = ledger.pages_for(len(command.input_ids))
        emitted = command.input_ids[command.prompt_len :]
        request = DecodeRequest.of(
            command,
            stream=HandOverStream(command.key, command.prefill),
            hand_over=DecodeHandOver(pages, ledger.windowed, len(command.choices)),
            checker=StopChecker(command.stops, self._tokenizer, emitted),
            num_drafts=self._config.drafts_for(command.speculate),
        )
        if self._core.admit(request, request.most_tokens):
            self._core.outbox.put(self._client, request.stream)
            self._core.faults.reach(Phase.QUEUED, request.stream.peer.incarnation)

    def cancel(self, command: Cancel) -> None:
        """See `Role`."""
        for request in self._core.choices_of(command.key):
            assert isinstance(request, DecodeRequest)
            self._leave(request, Outcome.ABORTED, End(EndReason.ABORTED))

    def handle(self, message: object) -> None:
        """See `Role`."""
        match message:
            case PullEnded():
                self._core.metrics.count_pull(message.pull)
                request = self._live(message.stream)
                if request is not None:
                    self._read_ended(request, message.pull)
            case PagesHashed():
                request = self._live(message.stream)
                if request is not None:
                    self._say_done(request, message.sums)
            case FromPeer():
                request = self._live(message.stream)
                if request is not None:
                    self._hear(request, message.said)
                else:
                    self._core.metrics.count_dropped(Dropped.HAND_OVER)
            case StreamLost():
                request = self._live(message.stream)
                if request is not None and request.hand_over.state is not DecodeState.VALID:
                    peer = message.stream.peer.incarnation
                    self._fail(request, message.cause, f"hand-over from {peer}: {message.detail}")
            case PeerAttested():
                self._meet(message.attestation)
            case PeerDied():
                self._dead.add(message.incarnation)
                self._peers.pop(message.incarnation, None)
                self._agent.confirm_death(message.incarnation, lambda: self._inbox.post(Wake()))

    # What to do next

    def admit(self) -> None:
        """See `Role`: grant what was asked for, in turn."""
        self._beat()
        limit = self._config.bypass_limit
        for request in admit_in_turn(self._core.ledger, self._asked(), self._reserve, limit):
            # What the prefix index has here already, and what no window needs, is not read.
            protected = request.held.num_protected_pages
            missing = [max(first, protected) for first in request.held.first_pages]
            self._say(request, request.hand_over.grant(missing))

    def schedule(self) -> Sequence[Scheduled]:
        """See `Role`: the next token of every running request."""
        return self._running.schedule()

    def settled(self, item: Scheduled, computed: Computed) -> None:
        """See `Role`: say the tokens, and whether they were the last."""
        request = item.request
        assert isinstance(request, DecodeRequest)
        self._running.settled(request, computed)

    def failed(self, request: Request, error: Exception) -> None:
        """See `Role`."""
        assert isinstance(request, DecodeRequest)
        end = End(EndReason.FAILED, error=f"the forward failed: {error}")
        self._leave(request, Outcome.ABORTED, end)

    def hand_back(self) -> None:
        """See `Role`: all of them, wherever they are."""
        for request in list(self._core.requests.values()):
            assert isinstance(request, DecodeRequest)
            outcome = Outcome.RETRACTED if request.every_step else Outcome.ABORTED
            self._leave(request, outcome, End(EndReason.RETRACTED))

    def load(self) -> Load:
        """See `Role`."""
        running, requests = len(self._running), self._core.requests.values()
        waiting = [r.input_len for r in requests if not r.settled_len]
        return Load(
            waiting_requests=len(requests) - running,
            running_requests=running,
            waiting_tokens=sum(waiting),
            pools=self._core.ledger.counts(),
            growth_tokens=self._growth.total_tokens(self._running),
            step_seconds=self._core.step_seconds,
            peers=tuple(self._peers.values()),
        )

    # The hand-over

    def _meet(self, attestation: Attestation) -> None:
        before = self._peers.get(attestation.peer)
        if attestation.refusal and not (before and before.refusal):
            self._core.metrics.count_refusal()
        if attestation.peer not in self._dead:
            self._peers[attestation.peer] = attestation

    def _hear(self, request: DecodeRequest, said: Said[FromPrefill]) -> None:
        try:
            if request.stream.words.hear(said, time.monotonic()):
                self._listen(request, said.message)
            else:
                self._core.metrics.count_dropped(Dropped.DUPLICATE)
        except ProtocolError as error:
            self._fail(request, Cause.PROTOCOL_ERROR, str(error))

    def _listen(self, request: DecodeRequest, message: FromPrefill) -> None:
        match message:
            case Ask():
                request.hand_over.on_ask()
            case Announce():
                self._core.faults.reach(Phase.ANNOUNCED, request.stream.peer.incarnation)
                self._pull(request, message)
            case Released():
                self._activate(request, message)
            case Ended():
                self._prefill_ended(request, message)

    def _beat(self) -> None:
        """Let every prefill worker that a request waits for hear of this one, now and then.

        One that does not answer, or a read that does not end, costs the request its attempt.
        """
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._peer_timeout / 3
        for request in list(self._core.requests.values()):
            assert isinstance(request, DecodeRequest)
            if request.hand_over.state is DecodeState.VALID:
                continue
            slowest = _SLOWEST_READ * self._peer_timeout
            if now - request.stream.words.heard_at > self._peer_timeout:
                peer = request.stream.peer.incarnation
                error = f"{peer} was silent for {self._peer_timeout:g} s"
                self._fail(request, Cause.PEER_LOST, error)
            elif request.reading and now - request.read_at > slowest:
                error = f"a read has not ended for {slowest:g} s"
                states = ", ".join(f"{pull.peer}: {pull.state.name}" for pull in request.reading)
                logger.warning("request %s: %s (%s)", request.key.request_id, error, states)
                self._fail(request, Cause.READ_FAILED, error)
            else:
                self._say(request, Beat())

    def _say(self, request: DecodeRequest, message: FromDecode) -> None:
        self._core.outbox.put(request.stream, request.stream.words.say(message))

    def _pull(self, request: DecodeRequest, message: Announce) -> None:
        """Read the announced pages straight into the reserved ones."""
        wanted = request.hand_over.on_announce(message)
        if message.first_tokens:
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
            request.reading.add(pull)
            request.read_at = time.monotonic()
            self._core.faults.reach(Phase.PULLING, stream.peer.incarnation)
        self._verify(request)

    def _read_ended(self, request: DecodeRequest, pull: Pull) -> None:
        if pull.state is not PullState.DONE:
            error = f"read from {pull.peer} failed: {pull.error}"
            self._fail(request, Cause.READ_FAILED, error)
            return
        if pull not in request.reading:  # its end was told before
            self._core.metrics.count_dropped(Dropped.DUPLICATE)
            return
        request.reading.remove(pull)
        request.read_at = time.monotonic()
        request.hand_over.on_read()
        self._verify(request)

    def _verify(self, request: DecodeRequest) -> None:
        """Once everything is read, hash what is to be compared; nothing is, as a rule."""
        hand_over, held, stream = request.hand_over, request.held, request.stream
        if not hand_over.has_read:
            return
        mode = self._config.verify_pages
        read = hand_over.places_read if mode is not VerifyPages.OFF else []
        places = choose(mode, read, request.key.request_id)
        if not places:
            self._say_done(request)
            return
        pages = locate(places, held.tables(), held.page_size, request.input_len)
        self._agent.hash_pages(pages, lambda sums: self._inbox.post(PagesHashed(stream, sums)))

    def _say_done(self, request: DecodeRequest, sums: Sequence[PageSum] = ()) -> None:
        self._say(request, request.hand_over.done(sums))
        self._core.faults.reach(Phase.PULLED, request.stream.peer.incarnation)

    def _activate(self, request: DecodeRequest, message: Released) -> None:
        """The prefill side has confirmed: the prompt's KV is here, and is what it should be."""
        valid = request.hand_over.on_released(message)
        self._core.metrics.count_verified(request.hand_over.num_compared)
        if not valid:
            self._core.metrics.count_mismatches(message.mismatches)
            error = f"{message.mismatches} pages are not as they were computed"
            self._fail(request, Cause.PAGE_MISMATCH, error)
            return
        request.activated_at = time.monotonic()
        self._core.outbox.put(request.stream, Leave())
        self._core.ledger.commit(request.held, request.input_len)
        live = []
        for choice, first in zip(request.choices, request.hand_over.first_tokens, strict=True):
            if first.finished:
                self._core.emit(request, end=End(EndReason.ABORTED), choice=choice)
            else:
                live.append((choice, first.token_id))
        self._running.begin(request, live)
        self._core.faults.reach(Phase.DECODING, request.stream.peer.incarnation)

    def _prefill_ended(self, request: DecodeRequest, message: Ended) -> None:
        if message.reason is HandOverEnd.FAILED:
            error = f"the prefill side failed: {message.detail}"
            self._fail(request, Cause.PEER_FAILED, error)
        else:
            self._leave(request, Outcome.ABORTED, End(EndReason.ABORTED))

    # The ways out

    def _retract(self, request: DecodeRequest) -> None:
        """Back to its router, which submits it again: another worker may have room."""
        end = End(EndReason.RETRACTED)
        self._core.end(request, Outcome.RETRACTED, end, timings=request.timings())
        self._core.faults.reach(Phase.RETRACTED, request.stream.peer.incarnation)

    def _fail(self, request: DecodeRequest, cause: Cause, error: str) -> None:
        end = End(EndReason.FAILED, error=error, cause=cause)
        self._leave(request, Outcome.ABORTED, end)

    def _leave(self, request: DecodeRequest, outcome: Outcome, end: End) -> None:
        """End a request early, wherever it is; its running reads still fence its pages."""
        self._running.leave(request)
        self._core.outbox.put(request.stream, Leave())
        self._core.end(request, outcome, end, timings=request.timings(), fences=request.pulls)

    # Memory

    def _reserve(self, request: DecodeRequest) -> bool:
        """The whole input, but for what the prefix index has, if the growth to come fits beside."""
        ledger, length = self._core.ledger, request.input_len
        growing = [r for r in self._core.requests.values() if r.lease is not None]
        if not self._core.reserve(request, length, self._growth.leaving(request, growing)):
            return False
        ledger.slide(request.held, length)
        grown = ledger.grow(request.held, length)
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
