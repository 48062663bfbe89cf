"""The errors that end a request, an operator's call or the router's start.

`status.py` maps each to a gRPC status, `http/errors.py` to an HTTP status, and nothing else does.

::

    StartError                 one line for the operator; the process does not start
    RequestError               ends one request
    ├── InvalidField           INVALID_ARGUMENT, names the field
    │   └── UnknownModel       the same
    ├── NotPermitted           PERMISSION_DENIED, names the field and the right
    ├── AlreadyExists          ALREADY_EXISTS
    ├── SessionExists          ALREADY_EXISTS
    ├── UnknownSession         NOT_FOUND
    ├── UnknownHistory         NOT_FOUND
    ├── SessionBusy            FAILED_PRECONDITION
    ├── SessionsFull           RESOURCE_EXHAUSTED, says when to try again
    ├── Overloaded             RESOURCE_EXHAUSTED, says when to try again
    ├── TextQueueFull          RESOURCE_EXHAUSTED, too
    ├── GrammarQueueFull       RESOURCE_EXHAUSTED, too
    ├── GrammarsFull           RESOURCE_EXHAUSTED, too
    ├── OverLimit              RESOURCE_EXHAUSTED, too: names the token's limit
    ├── SlowReader             RESOURCE_EXHAUSTED: the client does not read what it is sent
    ├── DeadlineExceeded       DEADLINE_EXCEEDED
    ├── DeadlineTooNear        DEADLINE_EXCEEDED, too, but at once
    ├── Unavailable            UNAVAILABLE: another try could succeed; may say when
    ├── DataLoss               DATA_LOSS: KV arrived damaged; --strict forbids to compute it again
    └── InternalFailure        INTERNAL: another attempt would fail the same way
    AdminError                 an operator's call is refused
    ├── UnknownWorker          NOT_FOUND, lists the workers that there are
    ├── CannotDrain            FAILED_PRECONDITION, says why
    ├── CannotScale            FAILED_PRECONDITION, says why
    ├── CannotRoll             FAILED_PRECONDITION, says why
    └── CannotShift            FAILED_PRECONDITION, says why
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvrelay.router.callers import Caller, Right


class StartError(Exception):
    """The router cannot start; the message is one line for the operator."""


class RequestError(Exception):
    """A request ends without a completion."""

    outcome: ClassVar[str]
    """Its value of the `outcome` metric label."""
    retry_after_ms: int | None = None
    """When the client should try again; None: the error does not say."""


class InvalidField(RequestError):  # noqa: N818 - the name says what it is
    """A field of the request cannot be served as it is."""

    outcome = "invalid"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message


class UnknownModel(InvalidField):
    """The request means another model than the served one."""

    def __init__(self, served: str, asked: str) -> None:
        super().__init__("model", f"must be {served!r} or empty, got {asked!r}")


class NotPermitted(RequestError):  # noqa: N818
    """The caller's token lacks the right to a field's value."""

    outcome = "denied"

    def __init__(self, field: str, caller: Caller, right: Right) -> None:
        lack = f"the token {caller.name} lacks the right {right}"
        super().__init__(f"{field}: {lack} (rights in --auth-token-file)")


class AlreadyExists(RequestError):  # noqa: N818
    """A live request has this id and another body, or is a turn of a session that was closed."""

    outcome = "conflict"

    def __init__(self, request_id: str, difference: str = "with another body") -> None:
        super().__init__(f"request_id: {request_id!r} is in use by a live request {difference}")


class SessionExists(RequestError):  # noqa: N818
    """The caller has a session with this id."""

    outcome = "conflict"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session_id: {session_id!r} is in use by an open session")


class UnknownSession(RequestError):  # noqa: N818
    """The caller has no session with this id here: it was closed, has expired, or is elsewhere."""

    outcome = "unknown_session"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session_id: there is no session {session_id!r} on this router: it was closed, or "
            "has expired"
        )


class UnknownHistory(RequestError):  # noqa: N818
    """Nobody has the history that a digest names."""

    outcome = "unknown_history"

    def __init__(self, digest: str) -> None:
        super().__init__(
            f"history_digest: neither this router nor a worker has the history {digest[:24]}... of "
            "a session of this token; open the session with its history"
        )


class SessionBusy(RequestError):  # noqa: N818
    """Another turn of the session runs."""

    outcome = "session_busy"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session_id: a turn of session {session_id!r} runs; queue_turn lets this one wait"
        )


class SessionsFull(RequestError):  # noqa: N818
    """The router keeps as many sessions, or as many tokens of them, as it takes."""

    outcome = "overloaded"

    def __init__(self, held: str, retry_after_ms: int) -> None:
        super().__init__(f"{held}, and the router keeps no more; try again in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class Overloaded(RequestError):  # noqa: N818
    """As many requests are live as the router takes: `--max-live-requests`."""

    outcome = "overloaded"

    def __init__(self, live: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{live} requests are live, and the router takes no more (--max-live-requests); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class TextQueueFull(RequestError):  # noqa: N818
    """The texts that are being tokenized are as long as the router takes: `--max-text-bytes`."""

    outcome = "overloaded"

    def __init__(self, num_bytes: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{num_bytes} bytes of text are being tokenized, and the router takes no more "
            f"(--max-text-bytes); try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class GrammarQueueFull(RequestError):  # noqa: N818
    """As many grammars wait to be checked as the router takes, of this caller or of all."""

    outcome = "overloaded"

    def __init__(self, num_waiting: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{num_waiting} grammars wait to be compiled, and the router takes no more; "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class GrammarsFull(RequestError):  # noqa: N818
    """The grammars of live requests take as much as the router lets them: `--max-grammar-bytes`."""

    outcome = "overloaded"

    def __init__(self, have: str, retry_after_ms: int) -> None:
        super().__init__(
            f"{have}, and the router takes no more (--max-grammar-bytes); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class OverLimit(RequestError):  # noqa: N818
    """The caller has as much on this router as its token allows."""

    outcome = "limited"

    def __init__(self, caller: Caller, limit: str, have: str, retry_after_ms: int) -> None:
        super().__init__(
            f"{have}: the token {caller.name} may have no more ({limit} in --auth-token-file); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class SlowReader(RequestError):  # noqa: N818
    """The client reads its stream too slowly: `--max-unread-bytes`, `--read-timeout`."""

    outcome = "slow_reader"


class DeadlineExceeded(RequestError):  # noqa: N818
    """The deadline that the client gave its call has passed."""

    outcome = "deadline"

    def __init__(self, when: str) -> None:
        super().__init__(f"the request's deadline has passed {when}")


class DeadlineTooNear(RequestError):  # noqa: N818
    """No first token can be expected before the deadline: `--deadline-margin`.

    A client that sets deadlines is ready for this status, and it ends as it would have, later. It
    is not RESOURCE_EXHAUSTED, which clients try again at once: that would not help a prompt that
    takes longer than its deadline, and workers that are behind do not need the call again.
    """

    outcome = "deadline_refused"

    def __init__(self, queue_seconds: float, prompt_seconds: float, left_seconds: float) -> None:
        super().__init__(
            f"the first token is expected in {queue_seconds + prompt_seconds:.3g} s "
            f"({queue_seconds:.3g} s for the prompts before, {prompt_seconds:.3g} s for this one), "
            f"and the deadline is in {left_seconds:.3g} s (--deadline-margin)"
        )


class Unavailable(RequestError):  # noqa: N818
    """No worker can serve the request now, or the one that did is lost."""

    outcome = "unavailable"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        hint = "" if retry_after_ms is None else f"; try again in {retry_after_ms} ms"
        super().__init__(message + hint)
        self.retry_after_ms = retry_after_ms


class DataLoss(RequestError):  # noqa: N818
    """KV arrived with other bytes than were computed; `--strict` forbids to compute it again."""

    outcome = "data_loss"


class InternalFailure(RequestError):  # noqa: N818
    """A worker failed the request and another attempt would fail too."""

    outcome = "internal"


class AdminError(Exception):
    """An operator's call cannot be carried out."""


class UnknownWorker(AdminError):  # noqa: N818
    """There is no worker of this name."""

    def __init__(self, worker: str, names: Iterable[str]) -> None:
        known = ", ".join(sorted(names)) or "none"
        super().__init__(f"worker: there is no {worker!r}; the workers are: {known}")


class CannotScale(AdminError):  # noqa: N818
    """The cluster cannot have so many workers."""


class CannotRoll(AdminError):  # noqa: N818
    """The workers cannot be replaced so, or not now."""


class CannotShift(AdminError):  # noqa: N818
    """The routers cannot be led to another cluster."""


class CannotDrain(AdminError):  # noqa: N818
    """The worker cannot be drained now."""
