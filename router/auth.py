"""Who may call the public service: those who bring a bearer token that is known here."""

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
    """Whether it can stand in a call's metadata."""
    return _TOKEN.fullmatch(text) is not None


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line; empty lines and those that begin with # are none.

    Raises:
        ValueError: it cannot be read, a line is no token, or there is none. The message
            has no token in it.
    """
    try:
        lines = path.read_text(encoding="latin-1").splitlines()  # every byte is some letter
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    tokens = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not is_token(line):
            raise ValueError(f"{path}: line {number} is not a token: letters, digits, -._~+/ and =")
        tokens.append(line)
    if not tokens:
        raise ValueError(f"{path}: there is no token in it")
    return tuple(tokens)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that brings this token."""
    return ((HEADER, f"Bearer {token}"),)


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Ends calls that bring none of the tokens with UNAUTHENTICATED, their message unread.

    Health checks need none: what checks a server's health, Kubernetes say, seldom has one,
    and they tell nothing but whether it serves. Every other service does, reflection too.
    How long a refusal takes does not depend on how much of a token was right.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See `grpc.aio.ServerInterceptor`."""
        if not handler_call_details.method.startswith(_OPEN):
            refusal = self._refusal(handler_call_details.invocation_metadata)
            if refusal is not None:
                return _refuse_with(refusal)
        return await continuation(handler_call_details)

    def _refusal(self, metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
        brought = [value for name, value in metadata if name == HEADER]
        if not brought:
            return f"{HEADER}: a bearer token is needed"
        [value] = brought if len(brought) == 1 else [""]
        if not isinstance(value, str) or not value.lower().startswith(_SCHEME):
            return f"{HEADER}: must be Bearer and a token"
        digest = _digest(value[len(_SCHEME) :].strip())
        # All of them, also after one that matches.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        return None if any(known) else f"{HEADER}: the bearer token is not known here"


def _digest(token: str) -> bytes:
    """Of one length, whatever the token's."""
    return hashlib.sha256(token.encode()).digest()


def _refuse_with(detail: str) -> grpc.RpcMethodHandler:
    """A handler for calls of any kind: it is of the one that reads nothing by itself."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, detail)

    return grpc.stream_stream_rpc_method_handler(refuse)
