"""What calls raise.

::

    ClientError
    ├── CallFailed    a router's status, or none could be reached
    └── Diverged      a retry gives other tokens than those that were delivered
"""

from __future__ import annotations

import grpc


class ClientError(Exception):
    """Of this library."""


class CallFailed(ClientError):  # noqa: N818
    """A call has ended without its result, and was not, or is not any more, tried again.

    Args:
        server: the router that was called last.
        status: of the call.
        detail: a sentence from the router, or from gRPC.
        retry_seconds: after which the router asks to be tried again; None: it did not say.
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
        """From what gRPC raises for a call."""
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
    """A stream that began again does not continue what was delivered.

    It happens in bfloat16 and float16 without --batch-invariant, where rounding depends on what is
    beside a request; and with routers whose --seed-key-file differ, if the request sets no seed.
    """
