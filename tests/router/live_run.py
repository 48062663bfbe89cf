"""A live request on recorded links, and a client of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.validation import Validator
from kvrelay.router.doors.grpc_service import EventBytes
from kvrelay.router.errors import RequestError
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import STALE_OUTPUTS, RouterMetrics
from kvrelay.router.placement.fleet import Placement
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.router.requests.attempt import AttemptFailed, AttemptRetracted
from kvrelay.router.requests.events import Completion, Delta
from kvrelay.router.requests.failover import Failover, Retry
from kvrelay.router.requests.live_request import LiveRequest
from kvrelay.router.requests.output_choice import Choice
from kvrelay.router.requests.output_stream import OutputStream
from kvrelay.router.requests.output_text import TextStream
from kvrelay.router.requests.readers import Patience, Readers
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.codec import Codec
from kvrelay.wire.output import (
    EndReason,
    FailureReason,
    PhaseTimings,
    RequestEnd,
    RequestOutput,
    SampledToken,
    TokenLogprob,
)
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole

from .recorded_link import RecordedLink

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
DELTA = Codec(Delta, pb.GenerateDelta)
MAX_UNREAD_BYTES = 10_000
HANDED_OVER = RequestEnd(EndReason.HANDED_OVER)
LENGTH = RequestEnd(EndReason.LENGTH)
ABORTED = RequestEnd(EndReason.ABORTED)
RETRACTED = RequestEnd(EndReason.RETRACTED)
BROKEN = RequestEnd(EndReason.FAILED, error="pull", cause=FailureReason.FAILED)


class RecordedFailover:
    """Remembers which attempts ended early, and has no workers for a retry."""

    def __init__(self) -> None:
        self.retracted: list[int] = []
        self.failed: list[tuple[set[int], str]] = []

    def decide(self, verdict: AttemptRetracted | AttemptFailed, unfinished: Any) -> Retry:
        if isinstance(verdict, AttemptRetracted):
            self.retracted += sorted(verdict.choices)
        else:
            self.failed.append((set(verdict.choices), str(verdict.error)))
        return Retry("test", "", 60.0)

    def alone(self, choices: Any) -> bool:
        return False


class Client:
    """Takes events, one more each time it `is_ready`; always, unless it was made busy."""

    def __init__(self, *, busy: bool = False) -> None:
        self.is_ready = asyncio.Event()
        self.taken: list[bytes] = []
        self._busy = busy
        if not busy:
            self.is_ready.set()

    async def take(self, event: bytes) -> None:
        self.taken.append(event)
        await self.is_ready.wait()
        if self._busy:
            self.is_ready.clear()

    @property
    def deltas(self) -> list[Delta]:
        """All events, which are deltas."""
        return list(map(delta_of, self.taken))

    @property
    def ids(self) -> list[int]:
        """The tokens of them."""
        return [token.token_id for delta in self.deltas for token in delta.tokens]


class Run:
    """A live request on two recorded links, and what its outcome was when it ended."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.links = (RecordedLink(PREFILL), RecordedLink(DECODE))
        self.ended: list[LiveRequest] = []
        self.failover = RecordedFailover()
        self.metrics = RouterMetrics("m")
        request = made(**params)
        stops = request.params.stops.with_eos([400])
        choices = [
            Choice(index, TextStream(tokenizer, stop=stops.stop), stops)
            for index in range(request.params.n)
        ]
        stopwatch = self.metrics.stopwatch()
        self.stream = OutputStream(request, choices, stopwatch, EventBytes(request.request_id))
        self.live = LiveRequest(
            request,
            self.stream,
            Readers(self.stream, Patience(MAX_UNREAD_BYTES, seconds=60)),
            cast("Failover", self.failover),
            self.metrics,
            stopwatch,
            itertools.count(7),
            self.ended.append,
        )
        prefill, decode = self.links
        self.live.start(Placement(cast("WorkerLink", decode), cast("WorkerLink", prefill)))

    def lose(self, link: int) -> None:
        self.live.on_lost(7, self.links[link].endpoint, "socket closed")

    @property
    def stale_outputs(self) -> float | None:
        name = STALE_OUTPUTS.name
        return self.metrics.registry.get_sample_value(name, {"model": "m"})

    def say(
        self,
        role: WorkerRole,
        index: int,
        ids: Sequence[int],
        end: RequestEnd | None = None,
        timings: PhaseTimings | None = None,
        choice: int = 0,
        **fields: Any,
    ) -> None:
        tokens = tuple(SampledToken(token_id) for token_id in ids)
        key = RequestKey("", "r", 7, choice)
        timings = timings or PhaseTimings()
        self.live.on_output(role, RequestOutput(key, index, tokens, end, timings, **fields))

    async def events(self) -> tuple[list[Delta], Completion | RequestError]:
        client = Client()
        try:
            with self.live.reader() as reader:
                await reader.pass_on(client.take)
        except RequestError as error:
            return client.deltas, error
        assert pb.GenerateResponse.FromString(client.taken.pop()).HasField("complete")
        assert isinstance(self.live.outcome, Completion)
        return client.deltas, self.live.outcome

    @property
    def cancels(self) -> list[list[int]]:
        return [link.cancels for link in self.links]


def delta_of(raw: bytes) -> Delta:
    return DELTA.from_message(pb.GenerateResponse.FromString(raw).delta)


def made(**params: Any) -> GenerationRequest:
    validator = Validator("m", lambda text, most_tokens: [], 16, Seeds(b"key"))
    message = pb.GenerateRequest(request_id="r", sampling_params=pb.SamplingParams(**params))
    message.input_ids.ids.extend([1, 2, 3])
    return validator.validate(message, RequestLimits(402, 512, 512, 512))


def scored(count: int) -> tuple[SampledToken, ...]:
    top = tuple(TokenLogprob(token, -0.5) for token in range(20))
    return tuple(SampledToken(token, -0.5, top) for token in range(count))
