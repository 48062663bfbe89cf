"""Bearer tokens, and the methods of the router that each token may call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import grpc

from kvrelay.net.channels import connection_of
from kvrelay.net.door_rules import ListenerRule, MethodAccess, MethodRule
from kvrelay.router.access.token_file import Tokens
from kvrelay.router.callers import ANYBODY, STRANGER, Caller, Right

HEADER: Final = "authorization"
_SCHEME: Final = "bearer "
_RIGHTS: Final = {MethodAccess.GENERATE: Right.GENERATE, MethodAccess.ADMIN: Right.ADMIN}
"""The right that a caller must have, by the access of a method; others need none."""
_caller: Final[ContextVar[Caller]] = ContextVar("caller")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata with which a client sends this token."""
    return ((HEADER, f"Bearer {token}"),)


def current_caller() -> Caller:
    """The client whose call is being handled: for handlers, in the call's own task.

    Raises:
        LookupError: no call is being handled, so nobody is the caller.
    """
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Note whose call is handled in this task, and in tasks that it starts."""
    _caller.set(caller)


def name_caller(context: grpc.aio.ServicerContext) -> str:
    """Note the connection of the present call; return the name in whose turn it is served."""
    caller = _caller.get().at(connection_of(context))
    _caller.set(caller)
    return caller.turn


class Refusal(Exception):  # noqa: N818
    """A refusal of a call for its token, or for the lack of one."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{HEADER}: {detail}")


class Unauthenticated(Refusal):
    """A refusal of a call without a token, or with an unknown one."""


class Forbidden(Refusal):
    """A refusal of a call whose token lacks a right."""


def identify(tokens: Tokens, sent: Sequence[str | bytes]) -> Caller:
    """Find the caller whose token a call brings.

    Args:
        tokens: the tokens that are valid now.
        sent: the values of its `authorization` headers.

    Raises:
        Unauthenticated: there is not exactly one, with a token that is known.
    """
    if not sent:
        raise Unauthenticated("a bearer token is needed")
    [value] = sent if len(sent) == 1 else [""]
    if not isinstance(value, str) or not value.lower().startswith(_SCHEME):
        raise Unauthenticated("must be 'Bearer' and one token")
    caller = tokens.find(value[len(_SCHEME) :].strip())
    if caller is None:
        raise Unauthenticated("the bearer token is not in the router's --auth-token-file")
    return caller


def check_access(caller: Caller, rule: MethodRule) -> None:
    """Raise `Forbidden` if the caller lacks the right to a method."""
    right = _RIGHTS.get(rule.access)
    if right is not None and not caller.may(right):
        raise Forbidden(
            f"the token {caller.name} lacks the right {right} (rights in --auth-token-file)"
        )


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """An interceptor that finds out who calls, before it reads the message.

    A call without a token is UNAUTHENTICATED, one without the right PERMISSION_DENIED. Health
    checks need no token: Kubernetes, for example, seldom has one, and the answer only says whether
    the server serves. All other methods need one, reflection too.

    Args:
        tokens: returns the tokens that are valid now; None: no call needs one.
        rule: the rules of the listener's methods.
    """

    def __init__(self, tokens: Callable[[], Tokens] | None, rule: ListenerRule) -> None:
        self._tokens = tokens
        self._rules = rule.methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, with its `current_caller`, or return a handler that refuses it."""
        rule = self._rules.get(handler_call_details.method)
        try:
            caller = self._caller(rule, handler_call_details.invocation_metadata)
        except Refusal as refusal:
            return _refuse_with(refusal)
        set_caller(caller)  # in the task in which grpc.aio calls the handler, too
        return await continuation(handler_call_details)

    def _caller(
        self, rule: MethodRule | None, metadata: Sequence[tuple[str, str | bytes]]
    ) -> Caller:
        """Find the caller of a method, known or not; raises `Refusal`."""
        if self._tokens is None:
            return ANYBODY
        if rule is not None and rule.access is MethodAccess.ANYBODY:
            return STRANGER
        caller = identify(self._tokens(), [value for name, value in metadata if name == HEADER])
        if rule is not None:
            check_access(caller, rule)
        return caller


_CODES: Final[dict[type[Refusal], grpc.StatusCode]] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
}


def _refuse_with(refusal: Refusal) -> grpc.RpcMethodHandler:
    """A handler that refuses calls of any kind; stream-stream, so it reads no message first."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(_CODES[type(refusal)], str(refusal))

    return grpc.stream_stream_rpc_method_handler(refuse)
