"""Bearer tokens, and the services of the router that each token may call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import grpc
from grpc_health.v1 import health

from kvrelay.router.access.token_file import Tokens
from kvrelay.router.callers import ANYBODY, Caller, Right
from kvrelay.v1 import admin_pb2, controller_pb2, inference_pb2

HEADER: Final = "authorization"
_SCHEME: Final = "bearer "
_OPEN: Final = f"/{health.SERVICE_NAME}/"
_ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_CONTROLLER: Final = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name
_INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_FOR_EVERY_TOKEN: Final = {
    f"/{_INFERENCE}/{method}" for method in ("GetModelInfo", "GetServerInfo", "GetLoads")
}
_caller: Final[ContextVar[Caller]] = ContextVar("caller", default=ANYBODY)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata with which a client sends this token."""
    return ((HEADER, f"Bearer {token}"),)


def current_caller() -> Caller:
    """The client whose call is being handled: for handlers, in the call's own task."""
    return _caller.get()


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


def check_right(caller: Caller, right: Right) -> None:
    """Raise `Forbidden` if the caller lacks the right."""
    if not caller.may(right):
        raise Forbidden(
            f"the token {caller.name} lacks the right {right} (rights in --auth-token-file)"
        )


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """An interceptor that refuses calls without a token or a right, before it reads the message.

    A call without a token is UNAUTHENTICATED, one without the right PERMISSION_DENIED. Health
    checks need no token: Kubernetes, for example, seldom has one, and the answer only says whether
    the server serves. All other services need one, reflection too.

    Args:
        tokens: returns the tokens that are valid now.
    """

    def __init__(self, tokens: Callable[[], Tokens]) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, with its `current_caller`, or return a handler that refuses it."""
        method = handler_call_details.method
        if not method.startswith(_OPEN):
            try:
                caller = self.identify(handler_call_details.invocation_metadata)
                _check_method(caller, method)
            except Refusal as refusal:
                return _refuse_with(refusal)
            _caller.set(caller)  # in the task in which grpc.aio calls the handler, too
        return await continuation(handler_call_details)

    def identify(self, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Find the caller whose token a call brings; raises `Unauthenticated` if there is none."""
        return identify(self._tokens(), [value for name, value in metadata if name == HEADER])


def _check_method(caller: Caller, method: str) -> None:
    """Raise `Forbidden` if the caller may not call the method; reflection takes any token."""
    if method.startswith((f"/{_ADMIN}/", f"/{_CONTROLLER}/")):
        check_right(caller, Right.ADMIN)
    elif method.startswith(f"/{_INFERENCE}/") and method not in _FOR_EVERY_TOKEN:
        check_right(caller, Right.GENERATE)


_CODES: Final[dict[type[Refusal], grpc.StatusCode]] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
}


def _refuse_with(refusal: Refusal) -> grpc.RpcMethodHandler:
    """A handler that refuses calls of any kind; stream-stream, so it reads no message first."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(_CODES[type(refusal)], str(refusal))

    return grpc.stream_stream_rpc_method_handler(refuse)
