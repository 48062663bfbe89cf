"""The OpenAI-compatible HTTP door: its paths, who may call them, and their small answers."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.net.door_rules import HTTP, MethodAccess, MethodRule
from kvrelay.net.receiving import OpenCalls
from kvrelay.router.access.auth import HEADER, Refusal, bearer, check_access, identify
from kvrelay.router.access.token_file import Tokens
from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.session_adoption import SessionAdoption
from kvrelay.router.callers import ANYBODY, Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http import openapi
from kvrelay.router.doors.http.answers import ChatStyle, CompletionStyle, Style
from kvrelay.router.doors.http.bodies import Bodies, take_rest
from kvrelay.router.doors.http.chat_tools import Dialect
from kvrelay.router.doors.http.completion_bodies import (
    Call,
    check_fits,
    read_chat_completion,
    read_completion,
    read_open_session,
)
from kvrelay.router.doors.http.completions import Completions
from kvrelay.router.doors.http.errors import (
    CLIENT_GONE,
    MESSAGES_PATH,
    ErrorAnswer,
    HttpError,
    answer_to,
    error_form,
    internal_error,
)
from kvrelay.router.doors.http.exchange import ClientGone, Exchange
from kvrelay.router.doors.http.json_body import parse_body, read_body, refusing_depth
from kvrelay.router.doors.http.left_out import LeftOut
from kvrelay.router.doors.http.live_page import LivePage
from kvrelay.router.doors.http.messages.message_calls import COUNT_PATH, MessageCalls
from kvrelay.router.doors.http.origins import is_loopback, with_hosts, with_origins
from kvrelay.router.doors.http.protocol import (
    BODIES,
    ChatCompletionRequest,
    CompletionRequest,
    SessionRequest,
)
from kvrelay.router.doors.http.reply import CompletionReply
from kvrelay.router.doors.http.responses.response_chat import read_responses
from kvrelay.router.doors.http.responses.responses_reply import ResponsesReply
from kvrelay.router.doors.http.tokenizer_calls import Tokenizing
from kvrelay.router.doors.progress_view import ProgressView
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.router.errors import RequestError, TooManyCalls, Unavailable, UnknownModel
from kvrelay.router.metrics import HTTP_RESPONSES, RouterMetrics
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.sessions import Sessions
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.encoding import decode
from kvrelay.v1 import inference_pb2 as pb

_log = logging.getLogger(__name__)
_PART_OF_A_BODY: Final = frozenset({408, 413})
"""The statuses of calls whose bodies may not have been read completely."""
Handler = Callable[[Exchange, Caller], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Behind:
    """The parts of the router that the door serves."""

    config: RouterConfig
    fleet: Fleet
    admission: Admission
    texts: Texts
    metrics: RouterMetrics
    template: ChatTemplate | None
    info: ServerInfo
    sessions: Sessions
    adoption: SessionAdoption
    tokens: Callable[[], Tokens] | None
    """A function that returns the present tokens; None: no token is required."""


def make_app(behind: Behind) -> ASGIApp:
    """Make the application of the door."""
    door = _Door(behind)
    paths = _paths(door)
    served = frozenset({one.path for one in paths if "{" not in one.path})
    routed = Starlette(
        routes=[one.route(behind) for one in paths],
        exception_handlers={
            HTTPException: functools.partial(_refuse, served),
            Exception: _fail,
        },
    )
    routed.router.redirect_slashes = False
    app: ASGIApp = _WithoutSlash(routed, served)
    app = with_origins(app, behind.config.http_origins)
    host = str(behind.config.http_address).rpartition(":")[0].strip("[]")
    if behind.tokens is None and is_loopback(host):
        app = with_hosts(app, behind.config.http_origins)
    return app


@dataclass(frozen=True, slots=True)
class _Path:
    """A path of the door, and its handler."""

    path: str
    method: str
    """The method; GET includes HEAD, except for a stream."""
    handler: Callable[..., Awaitable[None]]
    answers: Sequence[str] = (openapi.JSON,)
    """The media types of good answers; empty: an answer is only a status."""
    link: openapi.OperationLink | None = None

    @property
    def rule(self) -> MethodRule:
        """The rule of its calls."""
        return HTTP.methods[f"{self.method} {self.path}"]

    @property
    def open(self) -> bool:
        """Whether anybody may call it; its handler is then not told who calls."""
        return self.rule.access is MethodAccess.ANYBODY

    def route(self, behind: Behind) -> Route:
        """Return the path as a route of Starlette."""
        handler: Any = _Open(self.handler, self.rule)
        if not self.open:
            handler = _Endpoint(self.path, self.handler, behind, self.rule)
        made = Route(self.path, handler, methods=[self.method])
        # Starlette adds HEAD to GET, which would follow a stream.
        has_head = self.method == "GET" and self.answers != (openapi.EVENTS,)
        made.methods = {self.method, "HEAD"} if has_head else {self.method}
        return made

    def operation(self) -> openapi.Operation:
        """Return the path as an operation of the OpenAPI document."""
        path = self.path.replace(":path}", "}")
        about = openapi.about(self.handler)
        body = BODIES.get(self.path) if self.method == "POST" else None
        return openapi.Operation(
            path, self.method, about, not self.open, self.answers, body, self.link
        )


def _paths(door: _Door) -> Sequence[_Path]:
    """Return all paths of the door."""
    either, text = (openapi.JSON, openapi.EVENTS), ("text/plain",)
    opened = openapi.OperationLink("/v1/sessions/{session}", "DELETE", "session", "/id")
    listed = openapi.OperationLink("/v1/models/{model}", "GET", "model", "/data/0/id")
    return [
        _Path("/v1/completions", "POST", door.completions, either),
        _Path("/v1/chat/completions", "POST", door.chat_completions, either),
        _Path("/v1/responses", "POST", door.responses, either),
        _Path(MESSAGES_PATH, "POST", door.messages, either),
        _Path(COUNT_PATH, "POST", door.count_tokens),
        _Path("/v1/sessions", "POST", door.open_session, link=opened),
        _Path("/v1/sessions", "GET", door.list_sessions),
        _Path("/v1/sessions/{session:path}", "DELETE", door.close_session),
        _Path("/tokenize", "POST", door.tokenize),
        _Path("/detokenize", "POST", door.detokenize),
        _Path("/tokenizer_info", "GET", door.tokenizer_info),
        _Path("/v1/models", "GET", door.models, link=listed),
        _Path("/v1/models/{model:path}", "GET", door.models),
        _Path("/version", "GET", door.version),
        _Path("/metrics", "GET", door.metrics, text),
        _Path("/live", "GET", door.live, (openapi.EVENTS,)),
        _Path(openapi.PATH, "GET", door.openapi),
        _Path("/", "GET", door.page, answers=("text/html",)),
        _Path("/health", "GET", door.health, answers=()),
        _Path("/ready", "GET", door.health, answers=()),
        _Path("/ping", "GET", door.health, answers=()),
        _Path("/ping", "POST", door.health, answers=()),
    ]


class _WithoutSlash:
    """An application that serves a path with a slash at its end as the path without it."""

    def __init__(self, app: ASGIApp, served: Container[str]) -> None:
        self._app = app
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path[:-1] in self._served:
            scope = {**scope, "path": path[:-1]}
        await self._app(scope, receive, send)


class _Endpoint:
    """A handler as an ASGI application: it identifies the caller, and answers errors.

    Args:
        path: the path's name in metrics.
        handler: the path's handler.
        behind: what the door serves.
        rule: the path's rule.
    """

    def __init__(self, path: str, handler: Handler, behind: Behind, rule: MethodRule) -> None:
        self._path = path
        self._handler = handler
        self._tokens = behind.tokens
        self._rule = rule
        self._open = OpenCalls(rule)
        self._metrics = behind.metrics
        self._seconds = behind.config.read_timeout
        self._retry_after_ms = behind.config.retry_after_ms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._rule)
        status = CLIENT_GONE
        try:
            failed = await self._handle(exchange)
            status = exchange.status if failed is None else failed.status
        finally:
            self._metrics.count(HTTP_RESPONSES, path=self._path, status=str(status))

    async def _handle(self, exchange: Exchange) -> ErrorAnswer | None:
        """Answer the call; return the error that the client was told, in mid-stream or before."""
        close = False
        try:
            caller = self._caller(exchange)
            exchange.turn = caller.turn
            with self._open.one_more(caller.turn) as refusal:
                if refusal:
                    raise TooManyCalls(refusal, self._retry_after_ms)
                await self._handler(exchange, caller)
        except ClientGone:
            return ErrorAnswer(CLIENT_GONE, "", "")
        except (RequestError, Refusal) as error:
            told = answer_to(error)
        except HttpError as error:
            told, close = answer_to(error), error.status in _PART_OF_A_BODY
        except Exception:
            _log.exception("%s", self._path)
            told = internal_error()
        else:
            return None
        await exchange.fail(told, self._seconds, close=close)
        return told

    def _caller(self, exchange: Exchange) -> Caller:
        if self._tokens is None:
            return ANYBODY.at(exchange.connection)
        caller = identify(self._tokens(), _shown_tokens(exchange))
        check_access(caller, self._rule)
        return caller.at(exchange.connection)


def _shown_tokens(exchange: Exchange) -> Sequence[str]:
    """Return the values of `authorization`, or what they would be for the token in `x-api-key`."""
    keys = exchange.headers(b"x-api-key")
    return exchange.headers(HEADER.encode()) or [value for key in keys for _, value in bearer(key)]


class _Open:
    """A handler as an ASGI application for anybody."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]], rule: MethodRule) -> None:
        self._handler = handler
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(Exchange(scope, receive, send, self._rule))


class _Door:
    """The handlers of all paths."""

    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self._bodies = Bodies(behind.config.max_message_bytes)
        self._created = int(time.time())
        self._tokenizing = Tokenizing(behind.config, behind.fleet, behind.texts, behind.template)
        self._page = LivePage(
            behind.config.model_name,
            behind.info,
            ProgressView(behind.fleet),
            lambda: behind.admission.closing,
            behind.config.read_timeout,
        )
        self._dialect = Dialect.of(behind.config, behind.template)
        self._completions = Completions(
            behind.config,
            behind.admission,
            lambda ids: decode(behind.texts.tokenizer, ids, skip_special_tokens=False),
            behind.metrics,
        )
        self._left_out = LeftOut(behind.metrics)
        self._messages = MessageCalls(
            behind.config,
            behind.fleet,
            behind.admission,
            behind.texts,
            self._dialect,
            self._completions,
            self._left_out,
        )

    async def completions(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/completions: goes on with texts or token ids."""
        body = await self._body(exchange)
        with self._behind.admission.counting("http"), refusing_depth():
            call = read_completion(read_body(CompletionRequest, body), self._behind.texts)
            check_fits(call, caller, self._behind.config.max_live_requests)
        await self._serve(exchange, call, CompletionStyle(), caller)

    async def chat_completions(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/chat/completions: answers a conversation."""
        behind, body = self._behind, await self._body(exchange)
        with behind.admission.counting("http"), refusing_depth():
            chat = read_body(ChatCompletionRequest, body)
            call = read_chat_completion(chat, exchange.body_bytes, behind.texts, self._dialect)
        await self._serve(exchange, call, ChatStyle(), caller)

    async def messages(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/messages: answers a conversation, as Anthropic's API does."""
        await self._messages.answer(exchange, await self._body(exchange), caller)

    async def count_tokens(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/messages/count_tokens: the number of tokens of such a conversation."""
        await self._messages.count_tokens(exchange, await self._body(exchange), caller)

    async def _serve(self, exchange: Exchange, call: Call, style: Style, caller: Caller) -> None:
        """Answer a call in OpenAI's words, under the name by which it asked for the model."""
        name = call.message.model or self._behind.config.model_name
        reply = CompletionReply(style, call, name)
        await exchange.unless_gone(self._completions.serve(exchange, call, reply, caller))

    async def responses(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/responses: answers items, without a memory of earlier calls."""
        behind, body = self._behind, await self._body(exchange)
        with behind.admission.counting("http"), refusing_depth():
            asked = read_responses(body)
            call = asked.read(exchange.body_bytes, behind.texts, self._dialect)
            name = call.message.model or behind.config.model_name
            reply = ResponsesReply(asked, call.shown, name)
        self._left_out.note("/v1/responses", asked.left_out)
        exchange.error_event = reply.error_event
        await exchange.unless_gone(self._completions.serve(exchange, call, reply, caller))

    async def open_session(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/sessions: opens a session, as OpenSession does."""
        message = read_open_session(read_body(SessionRequest, await self._body(exchange)))
        session = await self._behind.adoption.open(caller, message)
        opened = {
            "id": session.session_id,
            "idle_timeout_seconds": session.idle_timeout_seconds,
            "tokens": len(session.tokens),
        }
        await _send(exchange, opened)

    async def list_sessions(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/sessions: the caller's sessions, as GetSessions tells of them."""
        states = await self._behind.info.sessions(caller)
        # Thousands of them take a while, in which others' tokens would wait.
        await exchange.answer(await asyncio.to_thread(_session_list, states))

    async def close_session(self, exchange: Exchange, caller: Caller) -> None:
        """DELETE /v1/sessions/ID: ends a session, as CloseSession does."""
        session_id = exchange.path_parameter("session") or ""
        self._behind.sessions.close(caller, session_id)
        await _send(exchange, {"id": session_id, "deleted": True})

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /tokenize: token ids of a text, or of a conversation."""
        body = await self._body(exchange)
        await exchange.answer(await self._tokenizing.tokenize(caller, body, exchange.body_bytes))

    async def detokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /detokenize: the text of token ids."""
        body = await self._body(exchange)
        await _send(exchange, await self._tokenizing.detokenize(caller, body))

    async def tokenizer_info(self, exchange: Exchange, caller: Caller) -> None:
        """GET /tokenizer_info: special tokens and the chat template."""
        await _send(exchange, self._tokenizing.info())

    async def models(self, exchange: Exchange, caller: Caller) -> None:
        """GET /v1/models: the served model, under each of its names."""
        names = self._behind.config.model_names
        asked = exchange.path_parameter("model")
        if asked is None:
            listed = {"object": "list", "data": list(map(self._model, names))}
            ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
            await _send(exchange, {**listed, **ends})
        elif asked in names:
            await _send(exchange, self._model(asked))
        else:
            raise UnknownModel(names, asked[:128])

    async def version(self, exchange: Exchange, caller: Caller) -> None:
        """GET /version: that of kvrelay."""
        await _send(exchange, {"version": version("kvrelay")})

    async def metrics(self, exchange: Exchange, caller: Caller) -> None:
        """GET /metrics: the router's, as at --metrics."""
        text = await asyncio.to_thread(generate_latest, self._behind.metrics.registry)
        await exchange.answer(text, headers=[(b"content-type", CONTENT_TYPE_LATEST.encode())])

    async def page(self, exchange: Exchange) -> None:
        """GET /: the live page, without a token: what it shows comes from /live."""
        await self._page.page(exchange)

    async def live(self, exchange: Exchange, caller: Caller) -> None:
        """GET /live: what the live page shows, each second."""
        await self._page.stream(exchange, caller)

    async def openapi(self, exchange: Exchange, caller: Caller) -> None:
        """GET /openapi.json: this document."""
        await _send(exchange, self._document)

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        operations = [one.operation() for one in _paths(self)]
        return openapi.document(operations, has_tokens=self._behind.tokens is not None)

    async def health(self, exchange: Exchange) -> None:
        """GET /health: 200 if requests are served, else 503, as soon as the router drains."""
        served = self._behind.fleet.ready and not self._behind.admission.draining
        await exchange.answer(b"", 200 if served else 503, headers=())

    async def _body(self, exchange: Exchange) -> dict[str, Any]:
        return parse_body(await exchange.body(self._bodies))

    def _model(self, name: str) -> dict[str, Any]:
        """Return OpenAI's description of the model, with vLLM's additions and Anthropic's."""
        config = self._behind.config
        try:
            max_model_len = self._behind.fleet.limits().most_tokens
        except Unavailable:  # before the first worker has come
            max_model_len = None
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._created,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "owned_by": "kvrelay",
            "root": str(config.model_path),
            "parent": None,
            "max_model_len": max_model_len,
        }


async def _send(exchange: Exchange, answer: dict[str, Any]) -> None:
    await exchange.answer(json.dumps(answer).encode())


def _session_list(states: Sequence[pb.SessionState]) -> bytes:
    """Return the list of sessions as JSON, the oldest first."""
    sessions = [
        MessageToDict(
            state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for state in states
    ]
    data = [{"id": one.pop("session_id"), **one} for one in sessions]
    return json.dumps({"object": "list", "data": data}).encode()


async def _refuse(served: Container[str], request: Request, error: Exception) -> Response:
    """Answer a call of a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = f"{request.method} {path[:128]} is not served"
    meant = "/v1/" + re.sub("^(/v1)*/", "", path.rstrip("/"))
    if meant != path and meant in served:
        what += f", but {meant} is: a client's base URL ends in /v1, once"
    told = answer_to(HttpError(error.status_code, "invalid_request_error", what))
    headers = dict(error.headers or {})
    if not await take_rest(request.scope, request.receive):
        headers["connection"] = "close"
    body = error_form(path)(told, "")
    return Response(body, told.status, headers, media_type="application/json")


async def _fail(request: Request, error: Exception) -> Response:
    told = internal_error()
    body = error_form(request.url.path)(told, "")
    return Response(body, told.status, media_type="application/json")
