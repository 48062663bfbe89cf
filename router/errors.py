"""The errors that end a request, an operator's call or the router's start.

`status.py` maps each to a gRPC status, `http/errors.py` to an HTTP status, and nothing else does.

::

    StartError                 one line for the operator; the process does not start
    RequestError               ends one request
    ├── InvalidField           INVALID_ARGUMENT, names the field
    │   ├── UnknownModel       the same
    │   └── ContextTooLong     the same
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
    ├── TooManyCalls           RESOURCE_EXHAUSTED, too
    ├── ReadersFull            RESOURCE_EXHAUSTED, too
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

from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvrelay.router.callers import Caller, Right


class StartError(Exception):
    """The router cannot start; the message is one line for the operator."""


class RequestError(Exception):
    """The end of a request without a completion."""

    outcome: ClassVar[str]
    """The error's value of the `outcome` metric label."""
    retry_after_ms: int | None = None
    """The time after which the client should try again; None: the error does not say."""


class InvalidField(RequestError):  # noqa: N818 - the name says what it is
    """A field of the request that cannot be served as it is."""

    outcome = "invalid"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message

    def rename(self, field: str) -> None:
        """Tell of the field by another name, which its client knows."""
        self.field, self.args = field, (f"{field}: {self.problem}",)


class UnknownModel(InvalidField):
    """A request for another model than the served one."""

    def __init__(self, served: Sequence[str], asked: str) -> None:
        names = ", ".join(map(repr, served))
        super().__init__("model", f"must be {names} or empty, got {asked!r}")


class ContextTooLong(InvalidField):
    """A prompt, or prompt and output together, for which the context has no room.

    Clients that shorten a conversation and try again know it by its first words.
    """

    def __init__(self, field: str, most_tokens: int, problem: str) -> None:
        super().__init__(
            field, f"This model's maximum context length is {most_tokens} tokens. {problem}"
        )


class NotPermitted(RequestError):  # noqa: N818
    """A field's value that the caller's token lacks the right to."""

    outcome = "denied"

    def __init__(self, field: str, caller: Caller, right: Right) -> None:
        lack = f"the token {caller.name} lacks the right {right}"
        super().__init__(f"{field}: {lack} (rights in --auth-token-file)")


class AlreadyExists(RequestError):  # noqa: N818
    """A live request with this id that the call cannot join.

    It has another body, is of a session that was closed, or no longer has its output's beginning.
    """

    outcome = "conflict"

    def __init__(self, request_id: str, difference: str = "with another body") -> None:
        super().__init__(f"request_id: {request_id!r} is in use by a live request {difference}")


class SessionExists(RequestError):  # noqa: N818
    """A session of the caller that has this id already."""

    outcome = "conflict"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session_id: {session_id!r} is in use by an open session")


class UnknownSession(RequestError):  # noqa: N818
    """A session id that the caller has not here: closed, expired, or on another router."""

    outcome = "unknown_session"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session_id: there is no session {session_id!r} on this router: it was closed, or "
            "has expired"
        )


class UnknownHistory(RequestError):  # noqa: N818
    """A history's digest that neither router nor workers know."""

    outcome = "unknown_history"

    def __init__(self, digest: str) -> None:
        super().__init__(
            f"history_digest: neither this router nor a worker has the history {digest[:24]}... of "
            "a session of this token; open the session with its history"
        )


class SessionBusy(RequestError):  # noqa: N818
    """A session of which another turn runs."""

    outcome = "session_busy"

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session_id: a turn of session {session_id!r} runs; queue_turn lets this one wait"
        )


class SessionsFull(RequestError):  # noqa: N818
    """A refusal: the router has as many sessions, or tokens of them, as it takes."""

    outcome = "overloaded"

    def __init__(self, held: str, retry_after_ms: int) -> None:
        super().__init__(f"{held}, and the router keeps no more; try again in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class Overloaded(RequestError):  # noqa: N818
    """A refusal: as many requests are live as `--max-live-requests` allows."""

    outcome = "overloaded"

    def __init__(self, live: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{live} requests are live, and the router takes no more (--max-live-requests); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class TextQueueFull(RequestError):  # noqa: N818
    """A refusal: the texts that are being tokenized have reached `--max-text-bytes`."""

    outcome = "overloaded"

    def __init__(self, num_bytes: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{num_bytes} bytes of text are being tokenized, and the router takes no more "
            f"(--max-text-bytes); try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class GrammarQueueFull(RequestError):  # noqa: N818
    """A refusal: too many grammars of this caller, or of all, wait to be checked."""

    outcome = "overloaded"

    def __init__(self, num_waiting: int, retry_after_ms: int) -> None:
        super().__init__(
            f"{num_waiting} grammars wait to be compiled, and the router takes no more; "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class GrammarsFull(RequestError):  # noqa: N818
    """A refusal: the grammars of live requests have reached `--max-grammar-bytes`."""

    outcome = "overloaded"

    def __init__(self, have: str, retry_after_ms: int) -> None:
        super().__init__(
            f"{have}, and the router takes no more (--max-grammar-bytes); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class TooManyCalls(RequestError):  # noqa: N818
    """A refusal: as many calls of one method are open, of the caller or of all, as may be."""

    outcome = "overloaded"

    def __init__(self, why: str, retry_after_ms: int) -> None:
        super().__init__(f"{why}; try again in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class ReadersFull(RequestError):  # noqa: N818
    """A refusal: as many streams of one live request are open as the router takes."""

    outcome = "overloaded"

    def __init__(self, request_id: str, readers: int, retry_after_ms: int) -> None:
        super().__init__(
            f"request_id: {readers} streams of the live request {request_id!r} are open, and the "
            f"router takes no more; try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class OverLimit(RequestError):  # noqa: N818
    """A refusal: the caller has as much on this router as its token allows."""

    outcome = "limited"

    def __init__(self, caller: Caller, limit: str, have: str, retry_after_ms: int) -> None:
        super().__init__(
            f"{have}: the token {caller.name} may have no more ({limit} in --auth-token-file); "
            f"try again in {retry_after_ms} ms"
        )
        self.retry_after_ms = retry_after_ms


class SlowReader(RequestError):  # noqa: N818
    """A client that reads its stream too slowly: `--max-unread-bytes`, `--read-timeout`."""

    outcome = "slow_reader"


class DeadlineExceeded(RequestError):  # noqa: N818
    """A deadline of a client's call that has passed."""

    outcome = "deadline"

    def __init__(self, when: str) -> None:
        super().__init__(f"the request's deadline has passed {when}")


class DeadlineTooNear(RequestError):  # noqa: N818
    """A refusal: no first token is expected before the deadline (`--deadline-margin`).

    A client that sets deadlines expects this status, which the call would end with later. It is not
    RESOURCE_EXHAUSTED, which clients try again at once. A retry would not help a prompt that takes
    longer than its deadline, and would add load to workers that are behind.
    """

    outcome = "deadline_refused"

    def __init__(self, queue_seconds: float, prompt_seconds: float, left_seconds: float) -> None:
        super().__init__(
            f"the first token is expected in {queue_seconds + prompt_seconds:.3g} s "
            f"({queue_seconds:.3g} s for the prompts before, {prompt_seconds:.3g} s for this one), "
            f"and the deadline is in {left_seconds:.3g} s (--deadline-margin)"
        )


class Unavailable(RequestError):  # noqa: N818
    """A request that no worker can serve now, or whose worker is lost."""

    outcome = "unavailable"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        hint = "" if retry_after_ms is None else f"; try again in {retry_after_ms} ms"
        super().__init__(message + hint)
        self.retry_after_ms = retry_after_ms


class DataLoss(RequestError):  # noqa: N818
    """KV that arrived damaged; `--strict` forbids to compute it again."""

    outcome = "data_loss"


class InternalFailure(RequestError):  # noqa: N818
    """A worker's failure of the request that another attempt would repeat."""

    outcome = "internal"


class AdminError(Exception):
    """An operator's call that cannot be carried out."""


class UnknownWorker(AdminError):  # noqa: N818
    """A name that no worker has."""

    def __init__(self, worker: str, names: Iterable[str]) -> None:
        known = ", ".join(sorted(names)) or "none"
        super().__init__(f"worker: there is no {worker!r}; the workers are: {known}")


class CannotScale(AdminError):  # noqa: N818
    """A number of workers that the cluster has no room for, or a change during another."""


class CannotRoll(AdminError):  # noqa: N818
    """A roll that is impossible with these options, or impossible now."""


class CannotShift(AdminError):  # noqa: N818
    """A shift of the routers to another cluster that is impossible."""


class CannotDrain(AdminError):  # noqa: N818
    """A worker that cannot be drained now."""
