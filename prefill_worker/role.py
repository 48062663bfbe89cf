"""What a prefill worker does next: ask, reserve, compute in chunks, announce, release."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.engine.commands import Cancel, PeerDied, Submit
from kvrelay.engine.core import EngineCore
from kvrelay.engine.outputs import End, EndReason, Load, RequestKey, Timings
from kvrelay.engine.request import Request
from kvrelay.engine.step import Scheduled
from kvrelay.engine.stop import Finish, StopChecker
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import ProtocolError
from kvrelay.kv_transfer.hand_over import (
    Done,
    Ended,
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
    PrefillRequest,
    StreamClosed,
    StreamMessage,
    StreamOpened,
)

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
        tokenizer: for stop strings.
        chunk_tokens: prompt tokens that one step computes at most.
    """

    def __init__(
        self, core: EngineCore, agent: TransferAgent, tokenizer: Tokenizer, chunk_tokens: int
    ) -> None:
        self._core = core
        self._agent = agent
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._waiting: list[PrefillRequest] = []
        self._computing: list[PrefillRequest] = []
        # Streams whose submission has not arrived yet: either may be first.
        self._early_streams: dict[RequestKey, HandOverStream] = {}

    # What arrives

    def submit(self, command: Submit) -> None:
        """See `Role`."""
        request = PrefillRequest(
            key=command.key,
            link=command.link,
            prompt_ids=command.prompt_ids,
            sampling=command.sampling,
            stops=command.stops,
            priority=command.priority,
            hand_over=PrefillHandOver(self._core.ledger.windowed),
        )
        if not self._core.admit(request, len(request.prompt_ids)):
            return
        request.stream = self._early_streams.pop(command.key, None)
        self._waiting.append(request)

    def cancel(self, command: Cancel) -> None:
        """See `Role`."""
        request = self._live(command.key)
        if request is not None:
            self._leave(request, HandOverEnd.ABORTED, End(EndReason.ABORTED))

    def handle(self, message: object) -> None:
        """See `Role`."""
        match message:
            case StreamOpened():
                self._open(message.stream)
            case StreamMessage():
                self._answer(message)
            case StreamClosed():
                self._close(message.stream)
            case PeerDied():
                self._drop_peer(message.incarnation)

    # What to do next

    def admit(self) -> None:
        """See `Role`: ask for grants, and reserve what was granted."""
        asked = Counter(r.decode_incarnation for r in self._ahead())
        for request in sorted(self._waiting, key=lambda r: r.turn):
            if request.hand_over.state is PrefillState.GRANTED:
                # The last token is computed in any case, to be sampled from.
                prompt = len(request.prompt_ids)
                if not self._core.reserve(request, prompt, known_tokens=prompt - 1):
                    return
                request.settled_len = request.held.cache_protected_len
                request.cached_tokens = request.settled_len
                self._announce(request)
                self._waiting.remove(request)
                self._computing.append(request)
            elif request.may_be_asked_for and asked[request.decode_incarnation] < ASK_AHEAD:
                asked[request.decode_incarnation] += 1
                self._say(request, request.hand_over.ask())

    def schedule(self) -> Sequence[Scheduled]:
        """See `Role`: the oldest prompts' next chunks, within the token budget."""
        budget = self._chunk_tokens
        scheduled = []
        for request in sorted(self._computing, key=lambda r: r.turn):
            if not budget:
                break
            request.begun = request.begun or time.monotonic()
            left = request.tokens_left
            chunk = min(left, budget)
            budget -= chunk
            grown = self._core.ledger.grow(request.held, request.held.kv_committed_len + chunk)
            assert grown, "a promise was broken"
            scheduled.append(Scheduled(request, chunk, sample=chunk == left))
        return scheduled

    def settled(self, item: Scheduled, token: SampledToken | None) -> None:
        """See `Role`: announce the pages that are complete now."""
        request = item.request
        assert isinstance(request, PrefillRequest)
        request.settled_len += item.num_tokens
        if token is not None:
            self._complete(request, token)
            return
        self._core.ledger.slide(request.held, request.settled_len)
        self._announce(request)

    def failed(self, request: Request, error: Exception) -> None:
        """See `Role`."""
        assert isinstance(request, PrefillRequest)
        failed = End(EndReason.FAILED, error=f"the forward failed: {error}")
        self._leave(request, HandOverEnd.FAILED, failed)

    def load(self) -> Load:
        """See `Role`."""
        return Load(
            waiting_requests=len(self._waiting),
            running_requests=len(self._core.requests) - len(self._waiting),
            waiting_tokens=sum(r.tokens_left for r in (*self._waiting, *self._computing)),
            pools=self._core.ledger.counts(),
        )

    # The hand-over

    def _open(self, stream: HandOverStream) -> None:
        """Take a stream for its request; a second one for the same is turned away."""
        request = self._live(stream.key)
        taken = request.stream if request else self._early_streams.get(stream.key)
        if taken is not None:
            self._core.outbox.put(
                stream, Ended(HandOverEnd.FAILED, "the hand-over is open already")
            )
        elif request is None:
            self._early_streams[stream.key] = stream
        else:
            request.stream = stream

    def _answer(self, message: StreamMessage) -> None:
        request = self._live(message.stream.key)
        if request is None or request.stream is not message.stream:
            return
        try:
            if isinstance(message.message, Grant):
                request.hand_over.on_grant()
                request.granted = True
                self._agent.serve(+1)
            elif isinstance(message.message, Done):
                self._say(request, request.hand_over.on_done())
                self._forget(request, Outcome.HANDED_OVER, None)
        except ProtocolError as error:
            failed = End(EndReason.FAILED, error=str(error), retryable=True)
            self._leave(request, HandOverEnd.FAILED, failed)

    def _close(self, stream: HandOverStream) -> None:
        if self._early_streams.get(stream.key) is stream:
            del self._early_streams[stream.key]
        request = self._live(stream.key)
        if request is not None and request.stream is stream:
            gone = End(EndReason.FAILED, error="the decode worker left", retryable=True)
            self._leave(request, HandOverEnd.ABORTED, gone)

    def _drop_peer(self, incarnation: str) -> None:
        """A decode worker is dead: its streams have ended, whether the network says so or not."""
        live = (r.stream for r in self._core.requests.values() if isinstance(r, PrefillRequest))
        for stream in [*live, *self._early_streams.values()]:
            if stream is not None and stream.decode_incarnation == incarnation:
                self._close(stream)

    def _announce(self, request: PrefillRequest) -> None:
        """Tell the decode side of the whole pages that have settled."""
        settled_pages = request.settled_len // request.held.page_size
        self._say(request, request.hand_over.announce(request.held.tables(), settled_pages))

    def _complete(self, request: PrefillRequest, token: SampledToken) -> None:
        """The prompt is computed: say its first token, and hand it over unless that ends it."""
        request.output_ids.append(token.token_id)
        finish = StopChecker(request.stops, self._tokenizer).check(token.token_id)
        if finish is not None:
            self._finish(request, token, finish)
            return
        self._computing.remove(request)
        held = request.held
        last = request.hand_over.announce_last(held.tables(), held.first_pages, token.token_id)
        self._say(request, last)
        handed = End(EndReason.HANDED_OVER)
        cached = request.cached_tokens
        self._core.emit(request, [token], handed, self._timings(request), cached_tokens=cached)

    def _finish(self, request: PrefillRequest, token: SampledToken, finish: Finish) -> None:
        self._say(request, request.hand_over.end(HandOverEnd.FINISHED))
        end = End(EndReason.FINISHED, finish)
        self._forget(request, Outcome.FINISHED, end, token)

    def _leave(self, request: PrefillRequest, reason: HandOverEnd, end: End) -> None:
        """End a request early; once it is announced, the router has had its last word."""
        told = request.hand_over.state is PrefillState.ANNOUNCED
        self._say(request, request.hand_over.end(reason, end.error))
        self._forget(request, Outcome.ABORTED, None if told else end)

    def _forget(
        self,
        request: PrefillRequest,
        outcome: Outcome,
        end: End | None,
        token: SampledToken | None = None,
    ) -> None:
        for requests in (self._waiting, self._computing):
            if request in requests:
                requests.remove(request)
        if request.granted:
            self._agent.serve(-1)
        tokens = [] if token is None else [token]
        timings = self._timings(request) if request.begun else None
        self._core.end(
            request,
            outcome,
            end,
            tokens=tokens,
            timings=timings,
            cached_tokens=request.cached_tokens,
        )

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
        if message is not None and request.stream is not None:
            self._core.outbox.put(request.stream, message)

    @staticmethod
    def _timings(request: PrefillRequest) -> Timings:
        return Timings(queue=request.seconds_queued(), prefill=request.seconds_computed())
