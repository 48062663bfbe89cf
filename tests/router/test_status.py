"""How a call ends that raises one of the router's errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvrelay.router.errors import InvalidField
from kvrelay.router.grpc_status import with_status


class Message:
    """As large as a client may send it."""


def refuse(message: Message, refusal: InvalidField) -> None:
    raise refusal


def refuse_because(message: Message, refusal: InvalidField) -> None:
    try:
        find_wrong(message)
    except ValueError as error:
        raise refusal from error


def refuse_meanwhile(message: Message, refusal: InvalidField) -> None:
    try:
        find_wrong(message)
    except ValueError:
        raise refusal  # noqa: B904 (the other error is its context, not its cause)


def find_wrong(message: Message) -> None:
    raise ValueError("wrong")


class UnreadCall:
    """A call whose client reads nothing, so that `abort` waits; it looks what is held then."""

    def __init__(self) -> None:
        self.message: weakref.ref[Message] | None = None
        self.status: grpc.StatusCode | None = None
        self.holds_message = True

    async def abort(self, status: grpc.StatusCode, detail: str, trailers: Any) -> None:
        assert self.message is not None
        self.status, self.holds_message = status, self.message() is not None
        raise grpc.aio.AbortError


@pytest.mark.parametrize("check", [refuse, refuse_because, refuse_meanwhile])
async def test_a_refused_call_whose_client_does_not_read_holds_no_message(
    check: Callable[[Message, InvalidField], None],
) -> None:
    """Though the error may be kept, as a request keeps its outcome."""
    call, refusal = UnreadCall(), InvalidField("text", "is wrong")

    @with_status
    async def handler(service: None, raw: bytes, context: Any) -> None:
        message = Message()
        call.message = weakref.ref(message)
        check(message, refusal)

    with pytest.raises(grpc.aio.AbortError):
        await handler(None, b"", call)
    assert call.status is grpc.StatusCode.INVALID_ARGUMENT
    assert not call.holds_message
