"""The gRPC service for clients."""

from __future__ import annotations

import asyncio
import functools
import time
from importlib.metadata import version
from typing import Final

import grpc
from tokenizers import Tokenizer

from kvrelay.router.auth import current_caller
from kvrelay.router.callers import Right
from kvrelay.router.config import RouterConfig
from kvrelay.router.errors import DeadlineExceeded, InvalidField, RequestError
from kvrelay.router.events import FinishReason
from kvrelay.router.fleet import Fleet
from kvrelay.router.incoming import MAX_TEXT_TOKENS, MessageReader
from kvrelay.router.live_request import LiveRequest
from kvrelay.router.live_requests import LiveRequests
from kvrelay.router.metrics import REQUESTS, SLOW_READERS, RouterMetrics, Stopwatch
from kvrelay.router.readers import is_due
from kvrelay.router.sampling_params import check_token_ids
from kvrelay.router.status import with_status
from kvrelay.router.text_threads import TextThreads
from kvrelay.router.validation import Validator, fingerprint
from kvrelay.text.encoding import TooManyTokens, decode, encode
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from kvrelay.wire.messages import WORKER_STATUS

_FEW_BYTES: Final = 1024
_FEW_PAGES: Final = 64
"""Of a message with token ids: to validate it takes about a tenth of a millisecond at most."""


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves `kvrelay.v1.InferenceService`; inference.proto describes each call."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        live: LiveRequests,
        tokenizer: Tokenizer,
        longest_token_bytes: int | None,
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
            encode=functools.partial(encode, tokenizer),
            default_max_tokens=config.default_max_tokens,
            marks_of=fleet.prefixes.marks_of,
        )
        self._reader = MessageReader(config.max_message_bytes, longest_token_bytes)
        self._texts = TextThreads(config.max_text_bytes, config.retry_after_ms)

    @with_status
    async def Generate(  # noqa: N802
        self, raw: bytes, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams a request's events, from the first, to one more reader."""
        deadline = _deadline(context)
        opening = self._open(raw, deadline)
        del raw  # up to 16 MiB, which nobody needs while the request is live
        live = await opening
        # Written, not yielded: a cancelled call then leaves the reader's context at
        # once, and not when a generator is collected.
        try:
            async with asyncio.timeout(None) as timeout:
                with live.reader(timeout, deadline) as reader:
                    async for event in reader:
                        await context.write(event)
        except TimeoutError:
            assert reader.error is not None
            self._metrics.count(SLOW_READERS)
            raise reader.error from None

    async def Abort(  # noqa: N802
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends a live request."""
        return pb.AbortResponse(aborted=self._live.abort(current_caller(), message.request_id))

    @with_status
    async def Tokenize(  # noqa: N802
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Token ids of a text."""
        add = not message.HasField("add_special_tokens") or message.add_special_tokens
        num_bytes = message.ByteSize()
        self._reader.check_size("text", num_bytes)
        try:
            input_ids = await self._texts.run(
                num_bytes,
                encode,
                self._tokenizer,
                message.text,
                MAX_TEXT_TOKENS,
                add_special_tokens=add,
            )
        except TooManyTokens as error:
            raise InvalidField(
                "text", f"has {error}; the router takes {MAX_TEXT_TOKENS}"
            ) from error
        return pb.TokenizeResponse(input_ids=input_ids)

    @with_status
    async def Detokenize(  # noqa: N802
        self, raw: bytes, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        message = self._reader.detokenize_request(raw)
        skip = not message.HasField("skip_special_tokens") or message.skip_special_tokens
        check_token_ids("input_ids", message.input_ids, self._fleet.limits().vocab_size)
        input_ids = list(message.input_ids)
        text = await self._texts.run(
            len(raw), decode, self._tokenizer, input_ids, skip_special_tokens=skip
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
            model_digest=self._fleet.model.name,
        )

    async def GetLoads(  # noqa: N802
        self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """The workers' load."""
        return pb.GetLoadsResponse(workers=self._workers())

    def close(self) -> None:
        """Drops the texts that wait to be tokenized; call it once no call is open."""
        self._texts.close()

    async def _open(self, raw: bytes, deadline: float | None) -> LiveRequest:
        """The live request of a call; counts one that ends before it is admitted."""
        stopwatch = self._metrics.stopwatch()
        try:
            async with asyncio.timeout_at(deadline):
                return await self._admit(raw, deadline, stopwatch)
        except (RequestError, TimeoutError, asyncio.CancelledError) as left:
            outcome: str = FinishReason.ABORT
            if isinstance(left, RequestError):
                outcome = left.outcome
            elif is_due(deadline):
                outcome = DeadlineExceeded.outcome
            self._metrics.count(REQUESTS, outcome=outcome)
            if isinstance(left, TimeoutError):
                raise DeadlineExceeded("before it was admitted") from None
            raise

    async def _admit(self, raw: bytes, deadline: float | None, stopwatch: Stopwatch) -> LiveRequest:
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded("before it came")
        limits, caller = self._fleet.limits(), current_caller()
        message = self._reader.generate_request(raw, limits)
        self._validator.check(message, limits, caller)
        running = self._live.get(caller, message.request_id)
        if running is not None:
            running.check_same(await self._texts.run(len(raw), fingerprint, message))
            if running.outcome is None:  # it may have been aborted meanwhile
                return running
        with self._live.slot(caller):
            if self._is_short(len(raw)) and not message.text:  # a thread costs more
                request = self._validator.validate(message, limits, caller)
            else:
                request = await self._texts.run(
                    len(raw), self._validator.validate, message, limits, caller
                )
            return self._live.open(request, stopwatch, deadline)

    def _is_short(self, num_bytes: int) -> bool:
        """Whether a message can be validated on the event loop; a token takes a byte or more."""
        pages = self._fleet.prefixes.pages_of(num_bytes)
        return num_bytes <= _FEW_BYTES and pages <= _FEW_PAGES

    def _workers(self) -> list[pb.WorkerStatus]:
        """All of them, as the caller may see them."""
        links = sorted(self._fleet.links, key=lambda link: link.endpoint.name)
        statuses = [link.status for link in links]
        if not current_caller().may(Right.ADMIN):
            statuses = [status.for_tenants() for status in statuses]
        return [WORKER_STATUS.to_message(status) for status in statuses]


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    """When the call ends, on the clock of `time.monotonic`; None: its client set no deadline."""
    seconds = context.time_remaining()
    return None if seconds is None else time.monotonic() + seconds
