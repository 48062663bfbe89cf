"""The HTTP status and the form of every error: the HTTP side of `router.grpc_status`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvrelay.router.access.auth import Forbidden, Refusal, Unauthenticated
from kvrelay.router.errors import (
    AlreadyExists,
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
)

_TOO_LONG: Final = "context_length_exceeded"
CLIENT_GONE: Final = 499
"""The status, in metrics, of a call whose client has left; it is never sent."""


class HttpError(Exception):
    """A refusal of a call before it becomes a request: for its path, its body or its size."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _Kind:
    """The answer to one class of errors."""

    status: int
    kind: str
    """The value of OpenAI's `type`."""
    may_retry: bool = True
    """Whether a retry may help; False: clients that retry by the status are told not to."""
    code: str | None = None
    """The value of OpenAI's `code`, by which clients tell errors of one type apart."""


_KINDS: Mapping[type[Exception], _Kind] = {
    InvalidField: _Kind(400, "invalid_request_error"),
    ContextTooLong: _Kind(400, "invalid_request_error", code=_TOO_LONG),
    UnknownModel: _Kind(404, "invalid_request_error", code="model_not_found"),
    Unauthenticated: _Kind(401, "authentication_error", code="invalid_api_key"),
    Forbidden: _Kind(403, "permission_error"),
    NotPermitted: _Kind(403, "permission_error"),
    AlreadyExists: _Kind(409, "conflict_error", may_retry=False),
    SessionExists: _Kind(409, "conflict_error", may_retry=False),
    UnknownSession: _Kind(404, "invalid_request_error"),
    UnknownHistory: _Kind(404, "invalid_request_error"),
    SessionBusy: _Kind(409, "conflict_error", may_retry=False),
    SessionsFull: _Kind(429, "rate_limit_error"),
    Overloaded: _Kind(429, "rate_limit_error"),
    OverLimit: _Kind(429, "rate_limit_error"),
    TextQueueFull: _Kind(429, "rate_limit_error"),
    GrammarQueueFull: _Kind(429, "rate_limit_error"),
    GrammarsFull: _Kind(429, "rate_limit_error"),
    TooManyCalls: _Kind(429, "rate_limit_error"),
    ReadersFull: _Kind(429, "rate_limit_error"),
    SlowReader: _Kind(499, "client_error"),
    DeadlineExceeded: _Kind(504, "timeout_error", may_retry=False),
    DeadlineTooNear: _Kind(504, "timeout_error", may_retry=False),
    Unavailable: _Kind(503, "service_unavailable_error"),
    DataLoss: _Kind(500, "server_error", may_retry=False),
    InternalFailure: _Kind(500, "server_error", may_retry=False),
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to a call that fails."""

    status: int
    message: str
    kind: str
    """The value of OpenAI's `type`."""
    param: str | None = None
    """The field at fault, if it is one's."""
    code: str | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


ErrorForm = Callable[[ErrorAnswer, str], bytes]
"""A function that returns the JSON body of an error, in a path's form, for the call with an id."""
MESSAGES_PATH: Final = "/v1/messages"
"""The path, and the beginning of those, that speak as Anthropic's do."""


STATUSES: Final[Mapping[int, str]] = {
    400: "The body cannot be served as it is",
    401: "There is no good token",
    403: "The token lacks a right, or the call comes from another page or host",
    404: "There is no such path, model, session or history",
    408: "The body did not arrive in time",
    409: "Another live request has the id",
    413: "The body is too large",
    415: "The body has an encoding that is not served",
    429: "Too many requests are live or wait",
    500: "The request fails workers, or may not be computed again",
    503: "No worker can serve it now",
    504: "Its deadline has passed or cannot be met",
}
"""The descriptions of error statuses, except that of an unknown method."""
ERROR_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}
"""The JSON schema of all error bodies."""


def answer_to(error: RequestError | Refusal | HttpError) -> ErrorAnswer:
    """Return the answer to a call that ends with this error."""
    if isinstance(error, HttpError):
        return ErrorAnswer(error.status, str(error), error.kind)
    kind, param = _KINDS[type(error)], getattr(error, "field", None)
    headers = [] if kind.may_retry else [(b"x-should-retry", b"false")]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    after_ms = error.retry_after_ms if isinstance(error, RequestError) else None
    if after_ms is not None:
        headers.append((b"retry-after", b"%d" % -(-after_ms // 1000)))
        headers.append((b"retry-after-ms", b"%d" % after_ms))
    return ErrorAnswer(kind.status, str(error), kind.kind, param, kind.code, headers)


def internal_error() -> ErrorAnswer:
    """Return the answer to a call that this router has failed, without the reason."""
    return ErrorAnswer(500, "the router has failed", "server_error")


def error_form(path: str) -> ErrorForm:
    """Return the form of the errors of a path."""
    return _as_anthropic if speaks_as_anthropic(path) else _as_openai


def speaks_as_anthropic(path: str) -> bool:
    """Return whether a path is one of Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def _as_openai(error: ErrorAnswer, _call_id: str) -> bytes:
    told = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": told}).encode()


_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _as_anthropic(error: ErrorAnswer, call_id: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == _TOO_LONG:  # agents shorten the conversation for these words
        message = f"prompt is too long: {message}"
    told = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": told, "request_id": call_id or None}).encode()
