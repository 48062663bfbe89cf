"""Every request that is live on this router."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.router.attempts import Attempts
from kvrelay.router.choice import Choice, StopRules
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import AlreadyExists, Overloaded, Unavailable
from kvrelay.router.fleet import Fleet, Placement
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.metrics import RouterMetrics, Stopwatch
from kvrelay.router.news import News
from kvrelay.router.text import TextStream


class LiveRequests:
    """Admits requests, finds them by their exact id, and forgets them when they end.

    Attempt numbers never repeat on a router: a request whose id was used
    before, by one that some worker may still be releasing, is another one.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, tokenizer: Tokenizer, metrics: RouterMetrics
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._live: dict[str, LiveRequest] = {}
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._closing = False
        self._news = News()

    def __len__(self) -> int:
        return len(self._live)

    def count(self, *, streaming: bool) -> int:
        """Live ones whose first token has come, or has not; callable from any thread."""
        return sum(live.streaming is streaming for live in list(self._live.values()))

    def open(self, request: GenerationRequest, stopwatch: Stopwatch) -> LiveRequest:
        """The live request of this id and body, else a new one, sent to its workers.

        The caller attaches a reader before it awaits anything.

        Raises:
            AlreadyExists: this id is live with another body.
            Overloaded: no more may be live.
            Unavailable: no workers are ready for it, or the router is stopping.
        """
        running = self._live.get(request.request_id)
        if running is None:
            return self._admit(request, stopwatch)
        if running.request.fingerprint != request.fingerprint:
            raise AlreadyExists(request.request_id)
        return running

    def abort(self, request_id: str) -> bool:
        """Ends the live request of exactly this id; false if there is none."""
        live = self._live.get(request_id)
        if live is not None:
            live.abort()
        return live is not None

    async def close(self, grace_seconds: float) -> None:
        """Admits no more, lets the live ones go on for the grace, then fails the rest."""
        self._closing = True
        try:
            async with asyncio.timeout(grace_seconds):
                while self._live:
                    await self._news.next()
        except TimeoutError:
            for live in list(self._live.values()):
                live.fail(Unavailable("the router is stopping"))

    def _admit(self, request: GenerationRequest, stopwatch: Stopwatch) -> LiveRequest:
        if self._closing:
            raise Unavailable("the router is stopping")
        if len(self._live) >= self._config.max_live_requests:
            raise Overloaded(len(self._live), self._config.retry_after_ms)
        placement = self._place(request)
        choices = self._choices(request, self._fleet.endpoints[0].eos_token_ids)
        live = LiveRequest(request, choices, stopwatch, self._forget)
        attempts = Attempts(live, self._fleet, self._config, self._metrics, self._numbers)
        self._live[request.request_id] = live
        live.assign(attempts)
        if placement is None:
            attempts.start_later()
        else:
            attempts.start(placement)
        return live

    def _place(self, request: GenerationRequest) -> Placement | None:
        """Workers for its first attempt; None: it has to wait for one that is being replaced."""
        try:
            return self._fleet.place(len(request.input_ids), request.total_tokens)
        except Unavailable:
            if self._fleet.awaits_successors:
                return None
            raise

    def _choices(self, request: GenerationRequest, eos_token_ids: Sequence[int]) -> list[Choice]:
        sampling = request.sampling
        eos = () if sampling.ignore_eos else eos_token_ids
        rules = StopRules(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset({*eos, *sampling.stop_token_ids}),
        )
        return [Choice(index, self._text_stream(request), rules) for index in range(sampling.n)]

    def _text_stream(self, request: GenerationRequest) -> TextStream:
        sampling = request.sampling
        return TextStream(
            self._tokenizer,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.request_id]
        self._news.announce()
