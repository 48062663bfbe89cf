"""The gRPC service for clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version

import grpc
from tokenizers import Tokenizer

from kvrelay.router.auth import current_caller
from kvrelay.router.client_messages import event_response
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import RequestError
from kvrelay.router.fleet import Fleet
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.live_requests import LiveRequests
from kvrelay.router.metrics import REQUESTS, RouterMetrics
from kvrelay.router.sampling_params import check_token_ids
from kvrelay.router.status import with_status
from kvrelay.router.validation import Validator
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from kvrelay.wire.messages import WORKER_STATUS


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `kvrelay.v1.InferenceService`; inference.proto describes each call."""

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

    @with_status
    async def Generate(  # noqa: N802
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams a request's events, from the first, to one more reader."""
        live = await self._open(message)
        # Written, not yielded: a cancelled call then leaves the reader's context at
        # once, and not when a generator is collected.
        with live.reader() as events:
            async for event in events:
                await context.write(event_response(live.request.request_id, event))

    async def Abort(  # noqa: N802
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends a live request."""
        return pb.AbortResponse(aborted=self._live.abort(current_caller(), message.request_id))

    async def Tokenize(  # noqa: N802
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Token ids of a text."""
        add = not message.HasField("add_special_tokens") or message.add_special_tokens
        input_ids = await asyncio.to_thread(self._encode, message.text, add_special_tokens=add)
        return pb.TokenizeResponse(input_ids=input_ids)

    @with_status
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

    @with_status
    async def GetModelInfo(  # noqa: N802
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """The served model, as its workers know it."""
        limits = self._fleet.limits()
        endpoint = self._fleet.known[0]
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
        """This router's version and state, and its workers."""
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
            # In a thread, because a long text takes long to tokenize.
            request = await asyncio.to_thread(
                self._validator.validate, message, self._fleet.limits(), current_caller()
            )
            return self._live.open(request, stopwatch)
        except RequestError as error:
            self._metrics.count(REQUESTS, outcome=error.outcome)
            raise

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _workers(self) -> list[pb.WorkerStatus]:
        links = sorted(self._fleet.links, key=lambda link: link.endpoint.name)
        return [WORKER_STATUS.to_message(link.status) for link in links]
