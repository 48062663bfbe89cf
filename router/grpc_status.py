"""The gRPC status of each error in `errors.py`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from kvrelay.router.errors import (
    AdminError,
    AlreadyExists,
    CannotDrain,
    CannotRoll,
    CannotScale,
    CannotShift,
    ContextTooLong,
    DataLoss,
    DeadlineExceeded,
    DeadlineTooNear,
    GrammarQueueFull,
    GrammarsFull,
    InternalFailure,
    InvalidField,
    NotPermitted,
    OverLimit,
    Overloaded,
    ReadersFull,
    RequestError,
    SessionBusy,
    SessionExists,
    SessionsFull,
    SlowReader,
    TextQueueFull,
    TooManyCalls,
    Unavailable,
    UnknownHistory,
    UnknownModel,
    UnknownSession,
    UnknownWorker,
)

_STATUS: dict[type[Exception], grpc.StatusCode] = {
    InvalidField: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.INVALID_ARGUMENT,
    ContextTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    SessionExists: grpc.StatusCode.ALREADY_EXISTS,
    UnknownSession: grpc.StatusCode.NOT_FOUND,
    UnknownHistory: grpc.StatusCode.NOT_FOUND,
    SessionBusy: grpc.StatusCode.FAILED_PRECONDITION,
    SessionsFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OverLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyCalls: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ReadersFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    DeadlineTooNear: grpc.StatusCode.DEADLINE_EXCEEDED,
    TextQueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GrammarQueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GrammarsFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    InternalFailure: grpc.StatusCode.INTERNAL,
    UnknownWorker: grpc.StatusCode.NOT_FOUND,
    CannotDrain: grpc.StatusCode.FAILED_PRECONDITION,
    CannotScale: grpc.StatusCode.FAILED_PRECONDITION,
    CannotRoll: grpc.StatusCode.FAILED_PRECONDITION,
    CannotShift: grpc.StatusCode.FAILED_PRECONDITION,
}

ServiceT = TypeVar("ServiceT")
MessageT = TypeVar("MessageT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[[ServiceT, MessageT, grpc.aio.ServicerContext], Awaitable[ResponseT]]


def with_status(
    handler: Handler[ServiceT, MessageT, ResponseT],
) -> Handler[ServiceT, MessageT, ResponseT]:
    """Wrap a service's handler: an error that it raises ends the call with its status."""

    @functools.wraps(handler)
    async def call(
        service: ServiceT, message: MessageT, context: grpc.aio.ServicerContext
    ) -> ResponseT:
        answer = handler(service, message, context)
        del message  # the handler lets go of it when it can
        try:
            return await answer
        except (RequestError, AdminError) as error:
            status, detail, trailers = _STATUS[type(error)], str(error), _trailers(error)
            # Its frames have the whole message, and abort may wait long for the client to read.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        await context.abort(status, detail, trailers)
        raise AssertionError("abort does not return")

    return call


def _trailers(error: Exception) -> tuple[tuple[str, str], ...]:
    if isinstance(error, RequestError) and error.retry_after_ms is not None:
        return (("retry-after-ms", str(error.retry_after_ms)),)
    return ()
