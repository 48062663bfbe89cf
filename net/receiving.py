"""Bounds on calls whose message has not arrived yet: half a message must not cost a server much."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvrelay.net.allocator import LARGE_BYTES, Trimmer

MOST_RECEIVING: Final = 64
"""The most messages that arrive at the same time. One more ends the call that waited longest."""
RECEIVE_SECONDS: Final = 20.0
"""Time for a message to arrive."""


class Receipts:
    """Messages that arrive at the same time: at most `MOST_RECEIVING`, each within a time."""

    def __init__(self) -> None:
        self._receiving: dict[asyncio.Timeout, None] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """A context in which one message arrives; raises TimeoutError if it comes too late."""
        if len(self._receiving) >= MOST_RECEIVING:
            oldest = next(iter(self._receiving))
            del self._receiving[oldest]
            if not oldest.expired():
                oldest.reschedule(0)
        try:
            async with asyncio.timeout(RECEIVE_SECONDS) as bound:
                self._receiving[bound] = None
                yield
        finally:
            self._receiving.pop(bound, None)


class BoundedReceipt(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """An interceptor that receives a call's message within bounds, then calls its handler.

    gRPC itself waits for ever, and logs a stack for each message that cannot be parsed. It reads
    more than about the first 64 KiB of a message only once somebody waits for it. Calls that end
    here have therefore cost no more. Calls with a stream of messages are passed on.

    The handler alone holds the message: gRPC's own iterator would keep it after the call, until the
    garbage collector runs.
    """

    def __init__(self) -> None:
        self._receipts = Receipts()
        self._trimmer = Trimmer()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return a handler that receives its message within the bounds."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler

        async def serve(_requests: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                await self._serve(handler, context)
            except BaseException as error:
                _forget_locals(error)
                raise

        # On the wire, a call with one message is a stream of one.
        return grpc.stream_stream_rpc_method_handler(
            serve, response_serializer=handler.response_serializer
        )

    async def _serve(
        self, handler: grpc.RpcMethodHandler, context: grpc.aio.ServicerContext
    ) -> None:
        message = await self._receive(handler.request_deserializer, context)
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(message, context))
            return
        answered = handler.unary_stream(message, context)
        del message  # the answer may take long
        if not inspect.isasyncgen(answered):
            await answered  # it writes to the context itself
            return
        async for response in answered:
            await context.write(response)

    async def _receive(
        self, parse: Callable[[bytes], Any] | None, context: grpc.aio.ServicerContext
    ) -> Any:
        """Receive and parse the call's message; abort the call if it is late or invalid."""
        try:
            async with self._receipts.bounded():
                raw = await context.read()
        except TimeoutError:
            self._trimmer.trim_soon()
            detail = "the call's message did not arrive in time"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, detail)
        if raw is grpc.aio.EOF:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        if len(raw) >= LARGE_BYTES:
            self._trimmer.trim_soon()
        try:
            return parse(raw) if parse is not None else raw
        except DecodeError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"the message: {error}")


def _forget_locals(error: BaseException) -> None:
    """Free what the frames of an error hold, above all the message.

    gRPC keeps the error of an aborted call in that call's state, a cycle which lives until the
    garbage collector comes by: hundreds of MiB, where huge prompts are refused.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, detail: str) -> NoReturn:
    await context.abort(code, detail)
    raise AssertionError("abort does not return")
