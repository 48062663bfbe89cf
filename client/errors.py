"""Errors that the client's calls raise.

::

    ClientError
    ├── CallFailed    a router's status, or none could be reached
    └── Diverged      a retry gives other tokens than those that were delivered
"""

from __future__ import annotations

import grpc


class ClientError(Exception):
    """The base of this library's errors."""


class CallFailed(ClientError):  # noqa: N818
    """The end of a call without its result; no other attempt is made.

    Args:
        server: the router that was called last.
        status: the call's status.
        detail: a sentence from the router, or from gRPC.
        retry_seconds: the router asks to be tried again after this time; None: it did not say.
    """

    def __init__(
        self, server: str, status: grpc.StatusCode, detail: str, retry_seconds: float | None = None
    ) -> None:
        super().__init__(f"{server}: {status.name}: {detail}")
        self.server = server
        self.status = status
        self.detail = detail
        self.retry_seconds = retry_seconds

    @classmethod
    def of(cls, server: str, error: grpc.RpcError) -> CallFailed:
        """Make the failure from the error that gRPC raises for a call."""
        hint = dict(error.trailing_metadata() or ()).get("retry-after-ms")
        seconds = int(hint) / 1000 if isinstance(hint, str) and hint.isdecimal() else None
        return cls(server, error.code(), error.details() or "", seconds)

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later, or on another router."""
        if self.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self.retry_seconds is not None  # else the message is too large, say
        return self.status is grpc.StatusCode.UNAVAILABLE


class Diverged(ClientError):  # noqa: N818
    """A stream that began again differs from the tokens that were delivered.

    It happens in bfloat16 and float16 without --batch-invariant, where rounding depends on the rest
    of the batch. It also happens if routers differ in --seed-key-file and the request sets no seed.
    """
