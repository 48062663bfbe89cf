"""The gRPC service for clients."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import grpc

from kvrelay.observe.trace_context import HEADER
from kvrelay.router.access.auth import current_caller
from kvrelay.router.admission.admission import Admission, IncomingRequest
from kvrelay.router.admission.prompt_input import prompt_of
from kvrelay.router.admission.sampling_params import check_token_ids
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.session_adoption import SessionAdoption
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.incoming_messages import MessageReader
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.grpc_status import with_status
from kvrelay.router.metrics import SLOW_READERS, RouterMetrics
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.requests.events import ChoiceEnd, Completion, Delta, Event
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.requests.output_stream import Form
from kvrelay.router.sessions import Sessions
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import TIMINGS


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The servicer of `kvrelay.v1.InferenceService`; inference.proto describes each call."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        live: LiveRequests,
        admission: Admission,
        texts: Texts,
        metrics: RouterMetrics,
        info: ServerInfo,
        sessions: Sessions,
        adoption: SessionAdoption,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._live = live
        self._admission = admission
        self._texts = texts
        self._metrics = metrics
        self._info = info
        self._sessions = sessions
        self._adoption = adoption
        self._reader = MessageReader(config.max_message_bytes, texts.longest_token_bytes)

    @with_status
    async def Generate(  # noqa: N802
        self, raw: bytes, context: grpc.aio.ServicerContext
    ) -> None:
        """Stream a request's events, from the first, to one more reader."""
        deadline = _deadline(context)
        read = [functools.partial(self._ask, raw)]
        del raw  # up to 16 MiB, which nobody needs while the request is live
        traceparent = _traceparent(context) if self._admission.traces else None
        live = await self._admission.open(
            read.pop(), current_caller(), deadline, door="grpc", traceparent=traceparent
        )
        # Written, not yielded: a cancelled call then leaves the reader's context at
        # once, and not when a generator is collected.
        try:
            async with asyncio.timeout(None) as timeout:
                with live.reader(timeout, deadline) as reader:
                    await reader.pass_on(context.write, sends_first=True)
        except TimeoutError:
            assert reader.error is not None
            self._metrics.count(SLOW_READERS)
            raise reader.error from None

    async def Abort(  # noqa: N802
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """End a live request."""
        return pb.AbortResponse(aborted=self._live.abort(current_caller(), message.request_id))

    @with_status
    async def Tokenize(  # noqa: N802
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Tokenize a text."""
        add = not message.HasField("add_special_tokens") or message.add_special_tokens
        num_bytes = message.ByteSize()
        self._reader.check_size("text", num_bytes)
        input_ids = await self._texts.tokenize(
            current_caller().turn, "text", message.text, num_bytes, add_special_tokens=add
        )
        return pb.TokenizeResponse(input_ids=input_ids)

    @with_status
    async def Detokenize(  # noqa: N802
        self, raw: bytes, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Make the text of token ids."""
        message = self._reader.detokenize_request(raw)
        skip = not message.HasField("skip_special_tokens") or message.skip_special_tokens
        check_token_ids("input_ids", message.input_ids, self._fleet.limits().vocab_size)
        text = await self._texts.detokenize(
            current_caller().turn, list(message.input_ids), len(raw), skip_special_tokens=skip
        )
        return pb.DetokenizeResponse(text=text)

    @with_status
    async def GetModelInfo(  # noqa: N802
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Return the served model, as its workers know it."""
        limits = self._fleet.limits()
        endpoint = self._fleet.known[0]
        return pb.GetModelInfoResponse(
            model=self._config.model_name,
            architecture=endpoint.architecture,
            vocab_size=limits.vocab_size,
            max_model_len=limits.most_tokens,
            dtype=self._config.dtype,
            eos_token_ids=endpoint.eos_token_ids,
            default_sampling_params=self._admission.defaults.message(),
        )

    async def GetServerInfo(  # noqa: N802
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Return this router's version and state, and its workers."""
        return self._info.message(current_caller())

    async def GetLoads(  # noqa: N802
        self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """Return the workers' load."""
        return pb.GetLoadsResponse(workers=self._info.workers(current_caller()))

    @with_status
    async def OpenSession(  # noqa: N802
        self, message: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        """Open a session for the caller."""
        self._reader.check_size("history", message.ByteSize())
        session = await self._adoption.open(current_caller(), message)
        return pb.OpenSessionResponse(
            session_id=session.session_id,
            idle_timeout_seconds=session.idle_timeout_seconds,
            tokens=len(session.tokens),
        )

    @with_status
    async def CloseSession(  # noqa: N802
        self, message: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        """Close a session of the caller."""
        self._sessions.close(current_caller(), message.session_id)
        return pb.CloseSessionResponse()

    async def GetSessions(  # noqa: N802
        self, message: pb.GetSessionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetSessionsResponse:
        """List the caller's sessions."""
        return pb.GetSessionsResponse(sessions=await self._info.sessions(current_caller()))

    def _ask(self, raw: bytes, limits: RequestLimits) -> IncomingRequest:
        message = self._reader.generate_request(raw, limits)
        return IncomingRequest(message, prompt_of(message, self._texts.encode), len(raw), _form)


def _form(request: GenerationRequest) -> Form:
    return EventBytes(request.request_id)


def _traceparent(context: grpc.aio.ServicerContext) -> str | None:
    """The client's `traceparent` header; None if there are several, which W3C wants ignored."""
    sent = [value for key, value in context.invocation_metadata() or () if key == HEADER]
    return sent[0] if len(sent) == 1 and isinstance(sent[0], str) else None


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    """The end of the call on the clock of `time.monotonic`; None: its client set no deadline."""
    seconds = context.time_remaining()
    return None if seconds is None else time.monotonic() + seconds


_DELTA = Codec(Delta, inference_pb2.GenerateDelta)
_CHOICE_END = Codec(ChoiceEnd, inference_pb2.ChoiceEnd)


class EventBytes:
    """The `Form` of a gRPC stream: each event is a GenerateResponse, serialized.

    Args:
        request_id: the id of the request whose events they are.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._plain = inference_pb2.GenerateResponse(request_id=request_id)
        """The message that is refilled for each delta without logprobs: nearly all events."""

    def __call__(self, event: Event) -> bytes:
        """Serialize an event."""
        if isinstance(event, Delta):
            if event.prompt_logprobs or (event.tokens and event.tokens[0].logprob is not None):
                response = self._response(delta=_DELTA.to_message(event))
            else:
                response = self._fill_in(event)
        else:
            response = self._response(complete=_completion_message(event))
        return bytes(response.SerializeToString())

    def _fill_in(self, event: Delta) -> inference_pb2.GenerateResponse:
        delta = self._plain.delta
        delta.index, delta.text, delta.choice = event.index, event.text, event.choice
        delta.token_ids[:] = [token.token_id for token in event.tokens]
        return self._plain

    def _response(self, **event: Any) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(request_id=self._request_id, **event)


def _completion_message(completion: Completion) -> inference_pb2.GenerateComplete:
    choices = list(map(_CHOICE_END.to_message, completion.choices))
    first = choices[0]
    matched = first.WhichOneof("matched_stop")
    return inference_pb2.GenerateComplete(
        finish_reason=first.finish_reason,
        **({matched: getattr(first, matched)} if matched else {}),
        choices=choices,
        usage=inference_pb2.Usage(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cached_tokens=completion.cached_tokens,
        ),
        timings=TIMINGS.to_message(completion.timings),
        seed=completion.seed,
        history_digest=completion.history_digest,
    )
