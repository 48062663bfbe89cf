"""Bearer tokens: which clients may call the public service."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health

HEADER: Final = "authorization"
_SCHEME: Final = "bearer "
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750's b64token
_OPEN: Final = f"/{health.SERVICE_NAME}/"


def is_token(text: str) -> bool:
    """Whether the text can be sent as a token in a call's metadata."""
    return _TOKEN.fullmatch(text) is not None


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line; empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: the file cannot be read, a line is not a token, or there is none. The
            message never contains a token.
    """
    try:
        lines = path.read_text(encoding="latin-1").splitlines()  # decodes any bytes
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    tokens = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not is_token(line):
            raise ValueError(
                f"{path}: line {number} is not a token: only letters, digits, -._~+/ and ="
            )
        tokens.append(line)
    if not tokens:
        raise ValueError(f"{path}: contains no token")
    return tuple(tokens)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata with which a client sends this token."""
    return ((HEADER, f"Bearer {token}"),)


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Refuses calls without one of the tokens with UNAUTHENTICATED and does not read their message.

    Health checks need no token: Kubernetes, say, seldom has one, and the answer tells
    nothing but whether the server serves. All other services need one, reflection too.
    The time that a refusal takes does not depend on how much of a token was right.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Passes the call on, or returns a handler that refuses it."""
        if not handler_call_details.method.startswith(_OPEN):
            refusal = self._refusal(handler_call_details.invocation_metadata)
            if refusal is not None:
                return _refuse_with(refusal)
        return await continuation(handler_call_details)

    def _refusal(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        sent = [value for name, value in metadata if name == HEADER]
        if not sent:
            return f"{HEADER}: a bearer token is needed"
        [value] = sent if len(sent) == 1 else [""]
        if not isinstance(value, str) or not value.lower().startswith(_SCHEME):
            return f"{HEADER}: must be 'Bearer' and one token"
        digest = _digest(value[len(_SCHEME) :].strip())
        # Compares all of them, also after one that matches, to always take the same time.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        return (
            None
            if any(known)
            else f"{HEADER}: the bearer token is not in the router's --auth-token-file"
        )


def _digest(token: str) -> bytes:
    """A digest, which has the same length for every token."""
    return hashlib.sha256(token.encode()).digest()


def _refuse_with(detail: str) -> grpc.RpcMethodHandler:
    """A handler that refuses calls of any kind; a stream-stream handler reads no message first."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)

    return grpc.stream_stream_rpc_method_handler(refuse)
