"""The checks that the worker's gRPC services share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvrelay.engine.scheduler.commands import Mailbox, Misdirected
from kvrelay.net.door_rules import WORKER
from kvrelay.wire.version import VERSION

logger = logging.getLogger(__name__)

_FIRST_SECONDS: Final = WORKER.methods["/kvrelay.v1.WorkerService/Attach"].receive_seconds


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
    """Read the message that a stream must begin with.

    Ends the call if it is another, cannot be read, or does not come within `_FIRST_SECONDS`.
    """
    first = None
    with contextlib.suppress(TimeoutError, DecodeError):
        async with asyncio.timeout(_FIRST_SECONDS):
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


async def check_version(context: grpc.aio.ServicerContext, router: str, version: str) -> None:
    """Refuse a router of another version: its messages may mean something else."""
    if version != VERSION:
        theirs = version or "an earlier version"
        detail = f"version: router {router} is of {theirs}, this worker of {VERSION}"
        logger.error("%s. It sends no requests here", detail)
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, detail)
