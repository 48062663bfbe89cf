"""What the worker's gRPC services share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn, Protocol, TypeVar

import grpc

from kvrelay.engine.commands import Inbox, Misdirected

MAX_MESSAGE_BYTES = 64 << 20
"""Either way; well above what a router takes from a client."""


class _OneOf(Protocol):
    def WhichOneof(self, oneof_group: str, /) -> str | None: ...  # noqa: N802


MessageT = TypeVar("MessageT", bound=_OneOf)


def make_server() -> grpc.aio.Server:
    """A server with bounded messages, whose port nobody else can share."""
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ]
    )


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Open a listener; returns its port. A port in use raises `OSError`."""
    try:
        bound: int = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"grpc_port: cannot listen on {host}:{port}, is it in use?") from error
    return bound


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
    """The message that a stream must begin with, or the call's end."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof(oneof) != expected:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{expected} must come first")
    return first


async def check_incarnation(
    context: grpc.aio.ServicerContext, meant: str, actual: str, inbox: Inbox
) -> None:
    """Refuse a caller that means another life of this worker; the engine counts it."""
    if meant != actual:
        inbox.post(Misdirected())
        detail = f"incarnation: this worker is {actual}, not {meant}"
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, detail)
