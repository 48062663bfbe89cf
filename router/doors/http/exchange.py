"""One HTTP call: its headers, its body within bounds, and its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Self

from starlette.types import Receive, Scope, Send

from kvrelay.net.allocator import LARGE_BYTES
from kvrelay.net.door_rules import MethodRule
from kvrelay.observe.trace_context import HEADER
from kvrelay.router.doors.http.bodies import CLOSE, Bodies, decode_body, take_rest, too_large
from kvrelay.router.doors.http.errors import (
    ErrorAnswer,
    HttpError,
    error_form,
    speaks_as_anthropic,
)
from kvrelay.router.errors import InvalidField

_MAX_ID_CHARACTERS: Final = 128
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):  # noqa: N818
    """An error: the client has left before its answer was complete."""


class Exchange:
    """One call: its body is received, and its answer sent.

    Args:
        scope: the call's ASGI scope.
        receive: the call's ASGI receive function.
        send: the call's ASGI send function.
        rule: the rule of its path.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, rule: MethodRule) -> None:
        self._rule = rule
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_rest = True  # of the body
        self.status = 0
        """The status that was sent; 0: none was."""
        self.id = self._sent_id() or uuid.uuid4().hex
        """The call's id for its client's logs: the x-request-id that it sent, or a new one."""
        self.body_bytes = 0
        """The body's size, once it was read."""
        self.wrote_at = 0.0
        """The time of the last events, on the clock of `time.monotonic`."""
        host, port = scope.get("client") or ("", 0)
        self.connection = f"{host}:{port}"
        """The client's address."""
        self.turn = self.connection
        """The caller in whose turn the call is served, once it is known."""
        self.error_event: Callable[[ErrorAnswer], bytes] = self._error_event
        """A function that returns the event that tells an error in mid-stream."""

    def headers(self, name: bytes) -> Sequence[str]:
        """Return the values of a header."""
        return [value.decode("latin-1") for key, value in self._scope["headers"] if key == name]

    @property
    def traceparent(self) -> str | None:
        """The client's traceparent header; None unless there is exactly one, as W3C demands."""
        sent = self.headers(HEADER.encode())
        return sent[0] if len(sent) == 1 else None

    def path_parameter(self, name: str) -> str | None:
        """Return a parameter of the path; None: the path has none of this name."""
        value: str | None = self._scope["path_params"].get(name)
        return value

    @property
    def deadline(self) -> float | None:
        """The time at which the client gives up, from its x-request-timeout-ms; None: never.

        Raises:
            InvalidField: the header is not a number.
        """
        sent = self.headers(b"x-request-timeout-ms")
        if not sent:
            return None
        text = sent[0]
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise InvalidField("x-request-timeout-ms", "must be a number of milliseconds")
        return time.monotonic() + int(text) / 1000

    async def body(self, bodies: Bodies) -> bytes:
        """Receive the whole body.

        A body of up to twice the bound is received completely before it is refused, so that its
        client reads the reason. The rest of a larger one is not received.

        Raises:
            HttpError: the body is too large, or does not arrive in time.
            ClientGone: the client has left.
        """
        length = self.headers(b"content-length")
        if length and int(length[0]) > 2 * bodies.most_bytes:
            raise too_large(bodies.most_bytes)
        try:
            async with bodies.receipts.bounded(self.turn, self._rule.receive_seconds):
                body = await self._read(bodies.most_bytes)
                encoding = ", ".join(self.headers(b"content-encoding"))
                body = await decode_body(body, encoding, bodies.most_bytes)
        except TimeoutError:
            bodies.trimmer.trim_soon()
            raise HttpError(408, "timeout_error", "the body did not arrive in time") from None
        self.body_bytes = len(body)
        if self.body_bytes >= LARGE_BYTES:
            bodies.trimmer.trim_soon()
        return body

    async def _read(self, most_bytes: int) -> bytes:
        body, received, more = bytearray(), 0, True
        while more and received <= 2 * most_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            received, more = received + len(message["body"]), message["more_body"]
            self._has_rest = more
            if received <= most_bytes:
                body += message["body"]
        if received > most_bytes:
            raise too_large(most_bytes)
        return bytes(body)

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; cancel it and raise `ClientGone` as soon as the client has left.

        The body must have been read.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _gone(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            self._has_rest = message["more_body"]

    async def answer(
        self, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (_JSON,)
    ) -> None:
        """Send a whole answer."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def write_part(self, part: bytes) -> None:
        """Send a part of an answer that is not a stream; `end` completes it."""
        if not self.status:
            await self._start(200, [_JSON])
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def fail(self, error: ErrorAnswer, seconds: float, *, close: bool = False) -> None:
        """Send an error; in mid-stream it is an event.

        Args:
            error: the answer that tells the error.
            seconds: the time that the client has to take it; then its connection is dropped.
            close: whether to close the connection, because unread parts of the body may follow.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._fail(error, close=close)
        except TimeoutError:
            self.abort()

    async def _fail(self, error: ErrorAnswer, *, close: bool) -> None:
        if not self.status:
            closing = [CLOSE] if close else []
            headers = [_JSON, *error.headers, *closing]
            await self.answer(self._error_body(error), error.status, headers)
            return
        await self.write(self.error_event(error))
        await self.end()

    def _error_body(self, error: ErrorAnswer) -> bytes:
        return error_form(self._scope["path"])(error, self.id)

    def _error_event(self, error: ErrorAnswer) -> bytes:
        return b"event: error\ndata: " + self._error_body(error) + b"\n\n"

    async def write(self, events: bytes) -> None:
        """Send events of a stream, which the first of them begins."""
        if not events:
            return
        self.wrote_at = time.monotonic()
        if not self.status:
            await self._start(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, last_events: bytes = b"") -> None:
        """End the stream, with its last events."""
        if last_events and not self.status:
            await self._start(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": last_events})

    def abort(self) -> None:
        """Drop the connection, with everything that its client has not read."""
        abort: Callable[[], None] = self._scope["extensions"]["kvrelay.abort"]["call"]
        abort()

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers = [*headers, (b"x-request-id", self.id.encode())]
        if speaks_as_anthropic(self._scope["path"]):
            headers.append((b"request-id", self.id.encode()))
        if CLOSE not in headers and self._has_rest and not await self._take_rest():
            headers.append(CLOSE)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _take_rest(self) -> bool:
        self._has_rest = not await take_rest(self._scope, self._receive)
        return not self._has_rest

    def _sent_id(self) -> str:
        sent = self.headers(b"x-request-id")
        fits = sent and sent[0].isascii() and sent[0].isprintable()
        return sent[0][:_MAX_ID_CHARACTERS] if fits else ""


class SilenceBreaker:
    """A context in which a stream is not silent for longer than so many seconds.

    Before its first token a stream's status is not sent, so that an error can have one of its own.
    The first silence ends that: the stream begins with what breaks it. Clients and proxies then
    know that the call is served.

    Args:
        exchange: the call whose stream it is.
        seconds: the longest silence; 0: any.
        sign: the comment, or the event, that breaks it.
    """

    def __init__(self, exchange: Exchange, seconds: float, sign: bytes) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._sign = sign
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._seconds:
            self._exchange.wrote_at = time.monotonic()
            self._timer = self._loop.call_later(self._seconds, self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _listen(self) -> None:
        """Break the silence if it has lasted, else listen again when it would have.

        A timer for each event would cost more than to write the event.
        """
        silent_seconds = time.monotonic() - self._exchange.wrote_at
        if silent_seconds >= self._seconds:
            silent_seconds = 0.0
            if self._writing is None or self._writing.done():
                self._writing = self._loop.create_task(self._break())
        self._timer = self._loop.call_later(self._seconds - silent_seconds, self._listen)

    async def _break(self) -> None:
        """Write the sign. Whatever is written later waits behind it, so nothing cancels it."""
        if self._timer is not None:
            await self._exchange.write(self._sign)
