"""Admission of requests from every door: checks, bounds, joins, and the live request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvrelay.router.admission.max_tokens import OutputLimit
from kvrelay.router.admission.prompt_input import Prompt, TextPrompt, TurnPrompt
from kvrelay.router.admission.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.structured_outputs import StructuredOutputs
from kvrelay.router.admission.validation import Validator, fingerprint
from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import AlreadyExists, DeadlineExceeded, RequestError, SessionsFull
from kvrelay.router.generation import GenerationRequest, Grammar
from kvrelay.router.metrics import DOOR_REQUESTS, REQUESTS, RouterMetrics, Stopwatch
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.requests.events import FinishReason
from kvrelay.router.requests.live_request import LiveRequest
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.requests.output_stream import Form
from kvrelay.router.requests.readers import is_due
from kvrelay.router.requests.request_trace import COMPLETION, NO_TRACING, RequestTrace, Tracing
from kvrelay.router.sessions import Sessions, Turn
from kvrelay.v1 import inference_pb2

_FEW_BYTES: Final = 1024
_FEW_PAGES: Final = 64
"""The most pages of a message with token ids that takes 0.1 ms at most to validate."""


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A client's message, as a door has read it."""

    message: inference_pb2.GenerateRequest
    prompt: Prompt
    """The message's prompt, or another that the door makes in its place."""
    num_bytes: int
    """The size of the whole message."""
    form: Callable[[GenerationRequest], Form]
    """A function that makes the form of a new live request's events."""
    is_whole: bool = False
    """Whether the prompt is a whole conversation, and not only the session's new part."""
    output: OutputLimit = OutputLimit.STRICT
    """The endpoint's rule for `max_tokens`."""
    call_ids: tuple[str, ...] = ()
    """Ids of the call that the message is a part of."""


class Admission:
    """The one way from a client's message to a live request.

    Args:
        config: the router's.
        fleet: the workers.
        live: the requests that are live.
        texts: tokenizes prompts, and has threads for work that would block the event loop.
        metrics: the router's.
        seeds: draws the seeds of requests that set none.
        structured: checks whether a structured output is supported.
        sessions: the sessions that a request may be a turn of.
        tracing: decides which requests are traced.
        defaults: the model's own sampling parameters.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        live: LiveRequests,
        texts: Texts,
        metrics: RouterMetrics,
        seeds: Seeds,
        structured: StructuredOutputs,
        sessions: Sessions,
        tracing: Tracing = NO_TRACING,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.defaults = defaults
        """The model's own sampling parameters, which hold where a request sets none."""
        self._tracing = tracing
        self._structured = structured
        self._sessions = sessions
        self._encode_turn = texts.encode_plain
        self._fleet = fleet
        self._live = live
        self._texts = texts.threads
        self._metrics = metrics
        self._retry_after_ms = config.retry_after_ms
        self._validator = Validator(
            model_names=config.model_names,
            encode=texts.encode,
            default_max_tokens=config.default_max_tokens,
            seeds=seeds,
            marks_of=fleet.prefixes.marks_of,
            defaults=defaults,
            encode_plain=texts.encode_plain,
        )

    @property
    def draining(self) -> bool:
        """Whether the router is about to stop, so that new requests had better go elsewhere."""
        return self._live.draining

    @property
    def closing(self) -> bool:
        """Whether no more requests are admitted, because the router is stopping."""
        return self._live.closing

    @property
    def traces(self) -> bool:
        """Whether `traceparent` headers are read."""
        return self._tracing.on

    @contextlib.contextmanager
    def counting(self, door: str) -> Iterator[None]:
        """Count a request that its door refuses while it reads it, before `open`."""
        try:
            yield
        except RequestError as error:
            self._metrics.count(DOOR_REQUESTS, door=door)
            self._metrics.count(REQUESTS, outcome=error.outcome)
            raise

    async def open(
        self,
        read: Callable[[RequestLimits], IncomingRequest],
        caller: Caller,
        deadline: float | None,
        door: str,
        *,
        traceparent: str | None = None,
        operation: str = COMPLETION,
    ) -> LiveRequest:
        """Return the caller's live request, new or joined; count one that ends before admission.

        The caller attaches a reader before it awaits anything.

        Args:
            read: makes an `IncomingRequest` from the client's bytes, within the limits.
            caller: the client that asks.
            deadline: the call's, on the clock of `time.monotonic`; None: it has none.
            door: the door's name in metrics.
            traceparent: the header, if the caller has sent one and requests are traced.
            operation: the operation's name in spans.

        Raises:
            RequestError: the request is refused.
        """
        stopwatch = self._metrics.stopwatch()
        trace = self._tracing.begin(traceparent, door, operation)
        self._metrics.count(DOOR_REQUESTS, door=door)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admit(read, caller, deadline, stopwatch, trace)
        except (RequestError, TimeoutError, asyncio.CancelledError) as left:
            outcome: str = FinishReason.ABORT
            if isinstance(left, RequestError):
                outcome = left.outcome
            elif is_due(deadline):
                outcome = DeadlineExceeded.outcome
            self._metrics.count(REQUESTS, outcome=outcome)
            late = DeadlineExceeded("before it was admitted")
            error = late if isinstance(left, TimeoutError) else left
            if trace is not None:
                trace.ended(error if isinstance(error, RequestError) else None)
            if error is late:
                raise late from None
            raise

    async def _admit(
        self,
        read: Callable[[RequestLimits], IncomingRequest],
        caller: Caller,
        deadline: float | None,
        stopwatch: Stopwatch,
        trace: RequestTrace | None,
    ) -> LiveRequest:
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded("before it came")
        limits = self._fleet.limits()
        ask = read(limits)
        message = ask.message
        if not ask.is_whole:
            self._sessions.check_turn(message)
        self._validator.check(message, limits, caller, ask.prompt, ask.output)
        running = self._live.get(caller, message.request_id)
        if running is not None:
            running.check_join(await self._fingerprint(ask, caller), self._retry_after_ms)
            if running.outcome is None:  # it may have been aborted meanwhile
                self._check_session(ask, caller, running)
                return running
        with self._live.slot(caller):
            grammar = await self._check_grammar(message.sampling_params, caller)
            turn = await self._begin_turn(ask, caller)
            try:
                request = await self._validate(self._of_turn(ask, turn), limits, caller, turn)
                request = replace(
                    _within_bounds(ask, request), grammar=grammar, call_ids=ask.call_ids
                )
                if trace is not None:
                    trace.admitted(request)
                live = self._live.open(request, stopwatch, deadline, ask.form(request), trace)
                if turn is not None and live.request.turn is not turn:  # another call was faster
                    self._check_session(ask, caller, live)
                    turn.end(None, "")
                return live
            except BaseException:
                if turn is not None:
                    turn.end(None, "")
                raise

    async def _check_grammar(
        self, params: inference_pb2.SamplingParams, caller: Caller
    ) -> Grammar | None:
        """The grammar that the output must follow, once checked; None: the output is free."""
        if not params.HasField("structured_output"):
            return None
        return await self._structured.check(params.structured_output, caller)

    async def _begin_turn(self, ask: IncomingRequest, caller: Caller) -> Turn | None:
        """The turn of the message's session, once it may begin; None: it names no session."""
        if not ask.message.session_id:
            return None
        if ask.is_whole:
            alone = ask.message.sampling_params.n <= 1 and not ask.message.cache_salt
            return self._sessions.begin_if_free(caller, ask.message.session_id) if alone else None
        mark = await self._fingerprint(ask, caller)
        return await self._sessions.begin_turn(caller, ask.message, mark)

    def _check_session(self, ask: IncomingRequest, caller: Caller, live: LiveRequest) -> None:
        """Raise `AlreadyExists` if a live request is a turn of a session closed and opened anew.

        To join it would leave the new session without the turn.
        """
        session_id, turn = ask.message.session_id, live.request.turn
        if not ask.is_whole and self._sessions.has_replaced(caller, session_id, turn):
            raise AlreadyExists(live.request.request_id, "of a session that was closed")

    def _cache_salt(self, ask: IncomingRequest, caller: Caller, turn: Turn | None) -> str:
        """The message's salt, or its session's, even if the message is no turn of the session."""
        if turn is not None:
            return turn.cache_salt
        message = ask.message
        return message.cache_salt or self._sessions.cache_salt_of(caller, message.session_id)

    def _of_turn(self, ask: IncomingRequest, turn: Turn | None) -> IncomingRequest:
        """Put the session's history before the prompt."""
        if turn is None or ask.is_whole:
            return ask
        new = ask.prompt
        if ask.message.HasField("text") and not turn.is_first:
            new = TextPrompt("text", ask.message.text, self._encode_turn)
        num_bytes = ask.num_bytes + 4 * len(turn.history)
        return replace(ask, prompt=TurnPrompt(turn.history, new), num_bytes=num_bytes)

    async def _validate(
        self, ask: IncomingRequest, limits: RequestLimits, caller: Caller, turn: Turn | None
    ) -> GenerationRequest:
        validate = partial(
            self._validator.validate,
            ask.message,
            limits,
            caller,
            ask.prompt,
            turn,
            self._cache_salt(ask, caller, turn),
            ask.output,
        )
        if self._is_short(ask):  # a thread costs more
            return validate()
        return await self._texts.run(caller.turn, _num_bytes(ask), validate)

    async def _fingerprint(self, ask: IncomingRequest, caller: Caller) -> bytes:
        return await self._texts.run(caller.turn, ask.num_bytes, fingerprint, ask.message)

    def _is_short(self, ask: IncomingRequest) -> bool:
        """Whether validation is short enough for the event loop; a token takes a byte or more."""
        if ask.prompt.num_tokens is None or _num_bytes(ask) > _FEW_BYTES:
            return False
        return self._fleet.prefixes.pages_of(ask.num_bytes) <= _FEW_PAGES


def _num_bytes(ask: IncomingRequest) -> int:
    """Return the bytes of the prompt, and the letters of what is tokenized beside it, twice."""
    return ask.num_bytes + 2 * sum(map(len, ask.message.sampling_params.bad_words))


def _within_bounds(ask: IncomingRequest, request: GenerationRequest) -> GenerationRequest:
    """Reserve the sessions' room for a turn's tokens.

    Without room, a request with the whole conversation is served outside its session.

    Raises:
        SessionsFull: there is no room, and the request is only a part of the conversation.
    """
    if request.turn is None:
        return request
    try:
        request.turn.take_room(len(request.input_ids))
    except SessionsFull:
        if not ask.is_whole:
            raise
        request.turn.end(None, "")
        return replace(request, turn=None)
    return request
