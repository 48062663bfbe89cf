"""The public gRPC service. Statuses are chosen here and nowhere else."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

import grpc
from tokenizers import Tokenizer

from kvrelay.router import wire
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import (
    AlreadyExists,
    DataLoss,
    InternalFailure,
    InvalidField,
    Overloaded,
    RequestError,
    Unavailable,
)
from kvrelay.router.fleet import Fleet
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.live_requests import LiveRequests
from kvrelay.router.metrics import RouterMetrics
from kvrelay.router.validation import Validator, check_token_ids
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

_STATUS = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    InternalFailure: grpc.StatusCode.INTERNAL,
}

MessageT = TypeVar("MessageT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[["InferenceService", MessageT, grpc.aio.ServicerContext], Awaitable[ResponseT]]


def _with_status(handler: Handler[MessageT, ResponseT]) -> Handler[MessageT, ResponseT]:
    """Ends the call with the status that belongs to the `RequestError` it raises."""

    @functools.wraps(handler)
    async def call(
        service: InferenceService, message: MessageT, context: grpc.aio.ServicerContext
    ) -> ResponseT:
        try:
            return await handler(service, message, context)
        except RequestError as error:
            await context.abort(_STATUS[type(error)], str(error), _trailers(error))
            raise  # not reached: abort raises

    return call


def _trailers(error: RequestError) -> tuple[tuple[str, str], ...]:
    if isinstance(error, Overloaded):
        return (("retry-after-ms", str(error.retry_after_ms)),)
    return ()


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers clients; see inference.proto for what each call promises."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        live: LiveRequests,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._live = live
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._started = time.monotonic()
        self._validator = Validator(
            model_name=config.model_name,
            encode=self._encode,
            default_max_tokens=config.default_max_tokens,
            max_message_bytes=config.max_message_bytes,
        )

    @_with_status
    async def Generate(  # noqa: N802
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams a request's events, from the first, to one more reader."""
        live = await self._open(message)
        # Written rather than yielded, so that a cancelled call leaves the
        # reader's context at once and not when a generator is collected.
        with live.reader() as events:
            async for event in events:
                await context.write(wire.event_response(live.request.request_id, event))

    async def Abort(  # noqa: N802
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends a live request."""
        return pb.AbortResponse(aborted=self._live.abort(message.request_id))

    async def Tokenize(  # noqa: N802
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Token ids of a text."""
        add = not message.HasField("add_special_tokens") or message.add_special_tokens
        input_ids = await asyncio.to_thread(self._encode, message.text, add_special_tokens=add)
        return pb.TokenizeResponse(input_ids=input_ids)

    @_with_status
    async def Detokenize(  # noqa: N802
        self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        skip = not message.HasField("skip_special_tokens") or message.skip_special_tokens
        check_token_ids("input_ids", message.input_ids, self._fleet.limits().vocab_size)
        text = await asyncio.to_thread(
            self._tokenizer.decode, list(message.input_ids), skip_special_tokens=skip
        )
        return pb.DetokenizeResponse(text=text)

    @_with_status
    async def GetModelInfo(  # noqa: N802
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """The served model, as its workers know it."""
        limits = self._fleet.limits()
        endpoint = self._fleet.endpoints[0]
        return pb.GetModelInfoResponse(
            model=self._config.model_name,
            architecture=endpoint.architecture,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            dtype=self._config.dtype,
            eos_token_ids=endpoint.eos_token_ids,
        )

    async def GetServerInfo(  # noqa: N802
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """This router and its workers."""
        return pb.GetServerInfoResponse(
            version=version("kvrelay"),
            uptime_seconds=time.monotonic() - self._started,
            live_requests=len(self._live),
            workers=self._workers(),
        )

    async def GetLoads(  # noqa: N802
        self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """The workers' load."""
        return pb.GetLoadsResponse(workers=self._workers())

    async def _open(self, message: pb.GenerateRequest) -> LiveRequest:
        stopwatch = self._metrics.stopwatch()
        try:
            # In a thread: a long text takes long to tokenize.
            request = await asyncio.to_thread(
                self._validator.validate, message, self._fleet.limits()
            )
            return self._live.open(request, stopwatch)
        except RequestError as error:
            self._metrics.refused(error.outcome)
            raise

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _workers(self) -> list[pb.WorkerStatus]:
        links = sorted(self._fleet.links, key=lambda link: link.endpoint.worker)
        return [
            wire.worker_status(link.endpoint, ready=link.ready, load=link.load) for link in links
        ]
