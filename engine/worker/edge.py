"""Checks that the worker's gRPC services share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn, Protocol, TypeVar

import grpc

from kvrelay.engine.scheduler.commands import Mailbox, Misdirected


class _OneOf(Protocol):
    def WhichOneof(self, oneof_group: str, /) -> str | None: ...  # noqa: N802


MessageT = TypeVar("MessageT", bound=_OneOf)


async def refuse(context: grpc.aio.ServicerContext, code: grpc.StatusCode, detail: str) -> NoReturn:
    """End a call with a status."""
    await context.abort(code, detail)
    raise AssertionError("abort does not return")


async def first_message(
    requests: AsyncIterator[MessageT],
    context: grpc.aio.ServicerContext,
    oneof: str,
    expected: str,
) -> MessageT:
    """Read the message that a stream must begin with; ends the call if it is another."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof(oneof) != expected:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{expected} must come first")
    return first


async def check_incarnation(
    context: grpc.aio.ServicerContext, meant: str, actual: str, inbox: Mailbox[Misdirected]
) -> None:
    """Refuse a caller that means another incarnation of this worker; the engine counts it."""
    if meant != actual:
        inbox.post(Misdirected())
        detail = f"incarnation: this worker is {actual}, not {meant}"
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, detail)
