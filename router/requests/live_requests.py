"""All requests that are live on this router."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from tokenizers import Tokenizer

from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import Overloaded, RequestError, Unavailable
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import WORKER_WAITS, RouterMetrics, Stopwatch
from kvrelay.router.notifier import Notifier
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.fleet import Fleet, Placement
from kvrelay.router.requests.failover import Failover
from kvrelay.router.requests.live_limits import GrammarRoom, TokenLimits
from kvrelay.router.requests.live_request import LiveRequest
from kvrelay.router.requests.output_choice import Choice
from kvrelay.router.requests.output_stream import Form, OutputStream
from kvrelay.router.requests.output_text import TextStream
from kvrelay.router.requests.readers import Patience, Readers
from kvrelay.router.requests.request_trace import RequestTrace
from kvrelay.text.encoding import decode
from kvrelay.text.reasoning_progress import ReasoningProgress
from kvrelay.text.token_texts import token_texts
from kvrelay.wire.output import RequestOutput

_log = logging.getLogger(__name__)
_MOST_LOGGED_TOKENS: Final = 4096
"""The number of tokens of a prompt, or of an output, that are logged: the first ones."""


class LiveRequests:
    """All live requests: admitted here, found by id, and dropped when they end.

    Attempt numbers never repeat on a router. So a worker that still releases an ended request does
    not confuse it with a new one of the same id.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, tokenizer: Tokenizer, metrics: RouterMetrics
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._live: dict[tuple[str, str], LiveRequest] = {}  # by `GenerationRequest.id`
        self._metrics = metrics
        self._attempt_numbers = itertools.count(1)
        self.draining = False
        """Whether the router is about to stop, and serves on until no request lives."""
        self.closing = False
        """Whether no more requests are admitted, because the router is stopping."""
        self._validating: Counter[str] = Counter()  # by the caller's name
        self._token_limits = TokenLimits(metrics, config.retry_after_ms)
        self._grammar_room = GrammarRoom(
            config.max_grammar_bytes, self._token_limits, config.retry_after_ms
        )
        self._ended = Notifier()
        self._request_log = RequestLog(tokenizer, with_prompts=config.log_prompts)

    def __len__(self) -> int:
        return len(self._live)

    def count(self, *, streaming: bool) -> int:
        """Count live requests whose first token has come, or has not; callable from any thread."""
        return sum(live.streaming is streaming for live in list(self._live.values()))

    @property
    def waiting_for_workers(self) -> int:
        """Requests that no worker could take yet; callable from any thread."""
        return sum(live.waits_for_workers for live in list(self._live.values()))

    def get(self, caller: Caller, request_id: str) -> LiveRequest | None:
        """The caller's live request with this id; None: there is none."""
        return self._live.get((caller.name, request_id))

    @contextlib.contextmanager
    def slot(self, caller: Caller) -> Iterator[None]:
        """Count one more request of the caller as live while it is validated.

        Raises:
            OverLimit: the caller has as many live requests as its token allows.
            Overloaded: `max_live_requests` are live, or being validated.
            Unavailable: the router is stopping.
        """
        if self.closing:
            raise _stopping()
        validating = self._validating[caller.name]
        self._token_limits.check_live(caller, self._live.values(), validating)
        taken = len(self._live) + self._validating.total()
        if taken >= self._config.max_live_requests:
            raise Overloaded(taken, self._config.retry_after_ms)
        self._validating[caller.name] += 1
        try:
            yield
        finally:
            self._validating[caller.name] -= 1
            self._validating += Counter()  # drops the names at zero
            if self.draining:
                self._ended.notify_all()

    def open(
        self,
        request: GenerationRequest,
        stopwatch: Stopwatch,
        deadline: float | None,
        form: Form,
        trace: RequestTrace | None = None,
    ) -> LiveRequest:
        """Return the caller's live request with this id and body, or submit a new one.

        The caller holds a `slot`, and attaches a reader before it awaits anything.

        Args:
            request: the validated request.
            stopwatch: runs since it arrived.
            deadline: the call's, on the clock of `time.monotonic`.
            form: the form of a new request's events.
            trace: the trace of a new request that is traced.

        Raises:
            AlreadyExists: a live request of the caller has this id and another body.
            ReadersFull: it has too many readers already.
            DeadlineTooNear: a new request's first token cannot be expected in time.
            OverLimit: with it more prompt tokens would wait than the caller's token allows.
            Unavailable: no workers are ready for it, and none are expected or too many requests
                wait for them; or the router is stopping.
            GrammarsFull: with this grammar, the grammars of live requests would take too much.
            InvalidField: its grammar alone takes too much.
        """
        running = self._live.get(request.id)
        if running is None:
            return self._admit(request, stopwatch, deadline, form, trace)
        running.check_join(request.fingerprint, self._config.retry_after_ms)
        return running

    def on_killed(self, output: RequestOutput) -> None:
        """Take a report of a forward that killed its worker; see `LiveRequest.on_killed`."""
        for live in list(self._live.values()):
            if live.has_lost(output.key.attempt):
                live.on_killed(output)

    def abort(self, caller: Caller, request_id: str) -> bool:
        """End the caller's live requests with exactly this id; return False if there is none.

        They are one, or those of all HTTP calls to which their client gave the id.
        """
        live = self.get(caller, request_id)
        found = [live] if live is not None else self._of_call(caller, request_id)
        for one in found:
            one.abort()
        return bool(found)

    def _of_call(self, caller: Caller, call_id: str) -> list[LiveRequest]:
        """The caller's live requests of the HTTP calls with this id."""
        return [
            live
            for live in self._live.values()
            if call_id in live.request.call_ids and live.request.caller.name == caller.name
        ]

    async def drain(self, seconds: float) -> None:
        """Return once no request is live, or being validated, or after so many seconds."""
        self.draining = True
        await self._until_none(seconds)

    async def close(self, grace_seconds: float) -> None:
        """Admit no more requests, wait for the live ones, fail the rest after the grace."""
        self.draining = self.closing = True
        if not await self._until_none(grace_seconds):
            for live in list(self._live.values()):
                live.fail(_stopping())

    async def _until_none(self, seconds: float) -> bool:
        """Wait until there is no request, for so many seconds at most; return whether it is so."""
        try:
            async with asyncio.timeout(seconds):
                while self._live or self._validating:
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _admit(
        self,
        request: GenerationRequest,
        stopwatch: Stopwatch,
        deadline: float | None,
        form: Form,
        trace: RequestTrace | None,
    ) -> LiveRequest:
        if self.closing:
            raise _stopping()
        num_tokens = len(request.input_ids)
        self._token_limits.check_queued(request.caller, self._live.values(), num_tokens)
        self._grammar_room.check(request, (one.request for one in self._live.values()))
        placement = self._place(request, deadline)
        choices = self._choices(request, self._fleet.known[0].eos_token_ids)
        stream = OutputStream(request, choices, stopwatch, form)
        patience = Patience(self._config.max_unread_bytes, self._config.read_timeout)
        live = LiveRequest(
            request,
            stream,
            Readers(stream, patience),
            Failover(self._fleet, self._config, self._metrics, stopwatch.arrived),
            self._metrics,
            stopwatch,
            self._attempt_numbers,
            self._forget,
            trace,
        )
        self._live[request.id] = live
        if placement is None:
            live.start_later()
        else:
            live.start(placement)
        return live

    def _place(self, request: GenerationRequest, deadline: float | None) -> Placement | None:
        """Find workers for its first attempt; None: it must wait for expected workers."""
        demand = Demand.of(request)
        try:
            return self._fleet.place(demand, deadline)
        except Unavailable as missing:
            if not self._fleet.expects(demand):
                raise
            if (waiting := self.waiting_for_workers) >= self._config.max_waiting_for_workers:
                self._metrics.count(WORKER_WAITS, outcome="full")
                why = f"{missing}, and {waiting} requests wait already (--max-waiting-for-workers)"
                raise Unavailable(why, self._config.retry_after_ms) from missing
            return None

    def _choices(self, request: GenerationRequest, eos_token_ids: Sequence[int]) -> list[Choice]:
        params = request.params
        stops = params.stops.with_eos(eos_token_ids)
        return [Choice(index, self._text_stream(request), stops) for index in range(params.n)]

    def _text_stream(self, request: GenerationRequest) -> TextStream:
        stops = request.params.stops
        thinking: ReasoningProgress | None = None
        if (reasoning := stops.reasoning_without_stops) is not None:
            thinking = ReasoningProgress(reasoning, token_texts(self._tokenizer).bytes_of)
        return TextStream(
            self._tokenizer,
            stop=stops.stop,
            min_tokens=stops.min_tokens,
            skip_special_tokens=stops.skip_special_tokens,
            thinking=thinking,
        )

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.id]
        if live.request.turn is not None:
            live.request.turn.end(live.history, live.generated_on, live.history_digest)
        self._request_log.write(live)
        self._ended.notify_all()


def _stopping() -> Unavailable:
    return Unavailable("the router is stopping")


class RequestLog:
    """A log with a line for each request, at level INFO; prompts and outputs are opt-in.

    Args:
        tokenizer: decodes their tokens.
        with_prompts: whether to log prompts and outputs, whatever the level of the process's log.
    """

    def __init__(self, tokenizer: Tokenizer, *, with_prompts: bool) -> None:
        self._tokenizer = tokenizer
        self._with_prompts = with_prompts
        _log.setLevel(logging.INFO if with_prompts else logging.NOTSET)

    def write(self, live: LiveRequest) -> None:
        """Write the line of a request that has its outcome."""
        if not _log.isEnabledFor(logging.INFO):
            return
        request, outputs, outcome = live.request, live.output_ids, live.outcome
        if isinstance(outcome, RequestError):
            ended = outcome.outcome
        else:
            assert outcome is not None, "it has not ended"
            ended = outcome.choices[0].finish_reason
        fields: dict[str, object] = {**live.log_fields, "outcome": str(ended)}
        message = "request %r ended: %s, %d prompt tokens, %d output tokens"
        said = [request.request_id, ended, len(request.input_ids), sum(map(len, outputs))]
        if self._with_prompts:
            fields["prompt"] = self._text(request.input_ids)
            fields["output"] = [self._text(output) for output in outputs]
            message += "; prompt %r, output %r"
            said += [fields["prompt"], fields["output"]]
        _log.info(message, *said, extra=fields)

    def _text(self, token_ids: Sequence[int]) -> str:
        shown = list(token_ids[:_MOST_LOGGED_TOKENS])
        return decode(self._tokenizer, shown, skip_special_tokens=False)
