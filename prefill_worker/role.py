"""What a prefill worker does next: ask, reserve, compute in chunks, announce, release."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.engine.admission import admit_in_turn
from kvrelay.engine.commands import Cancel, Dropped, Inbox, PeerDied, Submit
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.core import EngineCore
from kvrelay.engine.faults import Phase
from kvrelay.engine.outputs import NO_TIMINGS, Cause, End, EndReason, Load, RequestKey
from kvrelay.engine.prompts import ComputingPrompts, PromptRun
from kvrelay.engine.request import Request
from kvrelay.engine.step import Computed, Scheduled
from kvrelay.engine.stop import Finish, StopChecker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import PageSum, locate
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Announce,
    Beat,
    Done,
    Ended,
    FirstToken,
    FromPrefill,
    Grant,
    PrefillHandOver,
    PrefillState,
)
from kvrelay.kv_transfer.hand_over import (
    EndReason as HandOverEnd,
)
from kvrelay.mem_cache.release import Outcome
from kvrelay.model_runner.sampler import SampledToken
from kvrelay.prefill_worker.request import (
    HandOverStream,
    PagesHashed,
    PrefillRequest,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)

logger = logging.getLogger(__name__)

ASK_AHEAD = 4
"""Requests for each decode worker that may hold its grant before their turn to compute."""


class PrefillRole:
    """Schedules prompts. See `engine.loop.Role`.

    A request waits (no memory), is asked for, is granted by its decode worker,
    reserves its whole prompt here, computes it chunk by chunk and keeps it,
    locked, until its hand-over stream ends.

    Args:
        core: the worker's memory, requests and outputs.
        agent: looks after peers' reads while there may be any.
        inbox: where comparisons report their end.
        tokenizer: for stop strings.
        config: the token budget of a step, and how many may pass a misfit.
    """

    def __init__(
        self,
        core: EngineCore,
        agent: TransferAgent,
        inbox: Inbox,
        tokenizer: Tokenizer,
        config: WorkerConfig,
    ) -> None:
        self._core = core
        self._agent = agent
        self._inbox = inbox
        self._tokenizer = tokenizer
        self._chunk_tokens = config.chunk_tokens
        self._bypass_limit = config.bypass_limit
        self._peer_timeout = config.peer_timeout
        self._next_look = time.monotonic() + self._peer_timeout / 3
        self._waiting: list[PrefillRequest] = []
        self._computing: ComputingPrompts[PrefillRequest] = ComputingPrompts(core)
        # Streams whose submission has not arrived yet: either may be first.
        self._early_streams: dict[RequestKey, HandOverStream] = {}

    # What arrives

    def submit(self, command: Submit) -> None:
        """See `Role`."""
        request = PrefillRequest.of(command, hand_over=PrefillHandOver(self._core.ledger.windowed))
        # Here one request stands for all of its choices, and so does the first one's key.
        request.key = command.key.of_choice(0)
        if not self._core.admit(request, request.input_len):
            return
        request.stream = self._early_streams.pop(request.key, None)
        self._waiting.append(request)
        self._core.faults.reach(Phase.QUEUED, request.decode_incarnation)

    def cancel(self, command: Cancel) -> None:
        """See `Role`."""
        request = self._live(command.key.of_choice(0))
        if request is not None:
            self._leave(request, HandOverEnd.ABORTED, End(EndReason.ABORTED))

    def handle(self, message: object) -> None:
        """See `Role`."""
        match message:
            case StreamOpened():
                self._open(message.stream)
            case StreamMessage():
                self._answer(message)
            case PagesHashed():
                self._judge(message)
            case StreamClosed():
                self._close(message.stream)
            case PeerDied():
                self._drop_peer(message.incarnation)

    # What to do next

    def admit(self) -> None:
        """See `Role`: ask for grants, and reserve what was granted."""
        self._look_for_the_silent()
        granted = [r for r in self._waiting if r.hand_over.state is PrefillState.GRANTED]
        ledger, reserve = self._core.ledger, self._computing.reserve
        for request in admit_in_turn(ledger, granted, reserve, self._bypass_limit):
            self._waiting.remove(request)
            self._core.faults.reach(Phase.PREFILLING, request.decode_incarnation)
            self._announce(request)
        asked = Counter(r.decode_incarnation for r in self._ahead())
        for request in sorted(self._waiting, key=lambda r: r.turn):
            if request.may_be_asked_for and asked[request.decode_incarnation] < ASK_AHEAD:
                asked[request.decode_incarnation] += 1
                self._say(request, request.hand_over.ask())

    def schedule(self) -> Sequence[Scheduled]:
        """See `Role`: the prompts' next chunks, within the token budget."""
        return self._computing.schedule(self._chunk_tokens)

    def settled(self, item: Scheduled, computed: Computed) -> None:
        """See `Role`: announce the pages that are complete now."""
        request = item.request
        assert isinstance(request, PrefillRequest)
        self._computing.settled(request, item, computed)
        if item.sample:
            self._complete(request, computed.tokens)
        else:
            self._announce(request)

    def failed(self, request: Request, error: Exception) -> None:
        """See `Role`."""
        assert isinstance(request, PrefillRequest)
        failed = End(EndReason.FAILED, error=f"the forward failed: {error}")
        self._leave(request, HandOverEnd.FAILED, failed)

    def hand_back(self) -> None:
        """See `Role`: prompts that have not begun. The others finish, hand-over included."""
        for request in list(self._waiting):
            self._leave(request, HandOverEnd.ABORTED, End(EndReason.RETRACTED))

    def load(self) -> Load:
        """See `Role`."""
        return Load(
            waiting_requests=len(self._waiting),
            running_requests=len(self._core.requests) - len(self._waiting),
            waiting_tokens=sum([r.input_len for r in self._waiting]) + self._computing.tokens_left,
            pools=self._core.ledger.counts(),
            step_seconds=self._core.step_seconds,
        )

    # The hand-over

    def _open(self, stream: HandOverStream) -> None:
        """Take a stream for its request; a second one for the same is turned away."""
        request = self._live(stream.key)
        taken = request.stream if request else self._early_streams.get(stream.key)
        if taken is not None:
            self._core.metrics.count_dropped(Dropped.STREAM)
            refusal = Ended(HandOverEnd.FAILED, "the hand-over is open already")
            self._core.outbox.put(stream, stream.words.say(refusal))
        elif request is None:
            self._early_streams[stream.key] = stream
        else:
            request.stream = stream

    def _answer(self, message: StreamMessage) -> None:
        stream, said = message.stream, message.said
        if self._early_streams.get(stream.key) is stream:  # it can say no more than this
            stream.words.heard_at = time.monotonic()
            self._core.outbox.put(stream, stream.words.say(Beat()))
            return
        request = self._live(stream.key)
        if request is None or request.stream is not stream:
            self._core.metrics.count_dropped(Dropped.HAND_OVER)
            return
        try:
            if not stream.words.hear(said, time.monotonic()):
                self._core.metrics.count_dropped(Dropped.DUPLICATE)
            elif isinstance(said.message, Beat):
                self._say(request, Beat())
            elif isinstance(said.message, Grant):
                request.hand_over.on_grant()
                request.granted = True
                self._agent.serve(+1)
            elif isinstance(said.message, Done):
                self._done(request, stream, said.message)
        except ProtocolError as error:
            failed = End(EndReason.FAILED, error=str(error), cause=Cause.PROTOCOL_ERROR)
            self._leave(request, HandOverEnd.FAILED, failed)

    def _done(self, request: PrefillRequest, stream: HandOverStream, done: Done) -> None:
        released = request.hand_over.on_done(done)
        if released is not None:
            self._say(request, released)
            self._forget(request, Outcome.HANDED_OVER)
            return
        held = request.held
        try:
            places = [page.place for page in done.sums]
            pages = locate(places, held.tables(), held.page_size, request.input_len)
        except ValueError as error:
            raise ProtocolError(f"sums of what was not announced: {error}") from error
        self._agent.hash_pages(
            pages,
            lambda own: self._inbox.post(PagesHashed(stream, own, done.sums)),
        )

    def _judge(self, message: PagesHashed) -> None:
        """Compare; the pages were held all the while, if the request still lives."""
        request = self._live(message.stream.key)
        if request is None or request.stream is not message.stream:
            return
        mismatches = _count_mismatches(message.own, message.theirs)
        self._say(request, request.hand_over.on_verified(mismatches))
        # It may be what was computed here that is wrong: it is not published.
        self._forget(request, Outcome.ABORTED if mismatches else Outcome.HANDED_OVER)

    def _close(
        self,
        stream: HandOverStream,
        reason: HandOverEnd = HandOverEnd.ABORTED,
        error: str = "the decode worker left",
    ) -> None:
        if self._early_streams.get(stream.key) is stream:
            del self._early_streams[stream.key]
        request = self._live(stream.key)
        if request is not None and request.stream is stream:
            gone = End(EndReason.FAILED, error=error, cause=Cause.PEER_LOST)
            self._leave(request, reason, gone)

    def _drop_peer(self, incarnation: str) -> None:
        """A decode worker is dead: its streams have ended, whether the network says so or not."""
        for stream in self._streams():
            if stream.decode_incarnation == incarnation:
                self._close(stream)

    def _look_for_the_silent(self) -> None:
        """Give up on decode workers that ought to have said something long since."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._peer_timeout / 3
        for stream in self._streams():
            if now - stream.words.heard_at > self._peer_timeout:
                error = f"the decode worker was silent for {self._peer_timeout:g} s"
                self._close(stream, HandOverEnd.FAILED, error)

    def _streams(self) -> list[HandOverStream]:
        """All that are open."""
        live = [r.stream for r in self._core.requests.values() if isinstance(r, PrefillRequest)]
        return [stream for stream in [*live, *self._early_streams.values()] if stream is not None]

    def _announce(self, request: PrefillRequest) -> None:
        """Tell the decode side of the whole pages that have settled."""
        settled_pages = request.settled_len // request.held.page_size
        self._say(request, request.hand_over.announce(request.held.tables(), settled_pages))

    def _complete(self, request: PrefillRequest, tokens: Sequence[SampledToken]) -> None:
        """The prompt is computed: say the first tokens, and hand over what they do not end."""
        run = self._computing.leave(request)
        assert run is not None
        firsts = []
        for choice, token in zip(request.choices, tokens, strict=True):
            finish = self._check(request, token)
            self._tell(request, run, choice, token, finish)
            firsts.append(FirstToken(token.token_id, finished=finish is not None))
        if all(first.finished for first in firsts):
            self._say(request, request.hand_over.end(HandOverEnd.FINISHED))
            self._forget(request, Outcome.FINISHED)
            return
        held = request.held
        self._say(request, request.hand_over.announce_last(held.tables(), held.first_pages, firsts))

    def _check(self, request: PrefillRequest, token: SampledToken) -> Finish | None:
        checker = StopChecker(request.stops, self._tokenizer, request.output_ids)
        return checker.check(token.token_id)

    def _tell(
        self,
        request: PrefillRequest,
        run: PromptRun,
        choice: int,
        token: SampledToken,
        finish: Finish | None,
    ) -> None:
        reason = EndReason.HANDED_OVER if finish is None else EndReason.FINISHED
        is_first = choice == request.choices[0]
        self._core.emit(
            request,
            [token],
            End(reason, finish),
            run.timings(),
            index=len(request.output_ids),
            choice=choice,
            cached_tokens=run.cached_tokens,
            prompt_logprobs=run.scores if is_first else (),
        )

    def _leave(self, request: PrefillRequest, reason: HandOverEnd, end: End) -> None:
        """End a request early; once it is announced, the router has had its last word."""
        told = request.hand_over.is_announced
        self._say(request, request.hand_over.end(reason, end.error))
        self._forget(request, Outcome.ABORTED, None if told else end)

    def _forget(self, request: PrefillRequest, outcome: Outcome, end: End | None = None) -> None:
        """Its memory and its entry; `end` is `None` if the router has had the last word."""
        if request in self._waiting:
            self._waiting.remove(request)
        run = self._computing.leave(request)
        if request.granted:
            self._agent.serve(-1)
        self._core.end(request, outcome, end, timings=run.timings() if run else NO_TIMINGS)

    # Memory

    def _ahead(self) -> list[PrefillRequest]:
        """Requests that hold, or may soon hold, a decode worker's memory without computing."""
        states = (PrefillState.ASKED, PrefillState.GRANTED)
        return [r for r in self._waiting if r.hand_over.state in states]

    def _live(self, key: RequestKey) -> PrefillRequest | None:
        request = self._core.requests.get(key)
        assert request is None or isinstance(request, PrefillRequest)
        return request

    def _say(self, request: PrefillRequest, message: FromPrefill | None) -> None:
        stream = request.stream
        if message is None or stream is None:
            return
        if isinstance(message, Announce):
            self._core.faults.reach(Phase.ANNOUNCED, stream.decode_incarnation)
        self._core.outbox.put(stream, stream.words.say(message))


def _count_mismatches(own: Sequence[PageSum], theirs: Sequence[PageSum]) -> int:
    """Pages that differ; both sides name them in the same order."""
    differ = [mine.place for mine, other in zip(own, theirs, strict=True) if mine != other]
    if differ:
        pages = ", ".join(f"page {page} of pool {pool}" for pool, page in differ)
        logger.error("a decode worker has read other bytes than were computed: %s", pages)
    return len(differ)
