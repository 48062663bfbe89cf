"""The life of a call for completions, on every path: each prompt is a live request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvrelay.router.admission.admission import Admission, IncomingRequest
from kvrelay.router.callers import Caller
from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.answers import HeldAnswer, PromptPart
from kvrelay.router.doors.http.completion_bodies import Call
from kvrelay.router.doors.http.exchange import Exchange, SilenceBreaker
from kvrelay.router.doors.http.reply import Reply
from kvrelay.router.errors import InvalidField, SlowReader
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.metrics import SLOW_READERS, RouterMetrics
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.requests.events import Completion
from kvrelay.router.requests.live_request import LiveRequest
from kvrelay.router.requests.output_stream import Form
from kvrelay.router.requests.readers import Reader, Write
from kvrelay.v1 import inference_pb2

_MOST_HELD: Final = 16
"""The most prompts of a call that add `max_unread_bytes` each to the bound of its whole answer."""
_PIECE_BYTES: Final = 256 << 10
"""The bytes of a large answer's piece, which a client must take within `read_timeout`."""
Make = Callable[[int, GenerationRequest], Form]
"""A function that makes the form of the prompt with this number."""


class Completions:
    """The handler of all calls for completions; each path words its answers by a `Reply`.

    Args:
        config: the router's configuration.
        admission: makes live requests.
        decode_prompt: returns the text of a prompt's tokens, for echo.
        metrics: the router's metrics.
    """

    def __init__(
        self,
        config: RouterConfig,
        admission: Admission,
        decode_prompt: Callable[[Sequence[int]], str],
        metrics: RouterMetrics,
    ) -> None:
        self._read_timeout = config.read_timeout
        self._sse_keepalive = config.sse_keepalive
        self._max_unread_bytes = config.max_unread_bytes
        self._admission = admission
        self._decode_prompt = decode_prompt
        self._metrics = metrics

    async def serve(self, exchange: Exchange, call: Call, reply: Reply, caller: Caller) -> None:
        """Answer one call; raise `RequestError` if it fails."""
        serve = self._stream if call.stream else self._answer
        try:
            await serve(exchange, call, reply, caller)
        except InvalidField as error:
            error.rename(call.asked_as.get(error.field, error.field))
            raise

    async def _stream(self, exchange: Exchange, call: Call, reply: Reply, caller: Caller) -> None:
        def make(number: int, request: GenerationRequest) -> Form:
            return reply.chunks(self._part(call, number, request))

        with SilenceBreaker(exchange, self._sse_keepalive, reply.sign_of_life):
            completions = await self._run(exchange, call, reply, caller, make, exchange.write)
        try:
            async with asyncio.timeout(self._read_timeout):
                await exchange.end(reply.last_events(completions))
        except TimeoutError:
            self._metrics.count(SLOW_READERS)
            exchange.abort()

    async def _answer(self, exchange: Exchange, call: Call, reply: Reply, caller: Caller) -> None:
        held = HeldAnswer(self._max_unread_bytes * min(len(call.prompts), _MOST_HELD))

        def make(number: int, request: GenerationRequest) -> Form:
            return reply.whole(self._part(call, number, request), held)

        completions = await self._run(exchange, call, reply, caller, make, held.check)
        parts = reply.parts(completions)
        if held.is_large:
            await self._send_parts(exchange, parts)
        else:
            await exchange.answer(b"".join(parts))

    async def _send_parts(self, exchange: Exchange, parts: Iterable[bytes]) -> None:
        """Send a large answer; its client must take each piece within `read_timeout`."""
        try:
            for piece in _pieces(parts):
                async with asyncio.timeout(self._read_timeout):
                    await exchange.write_part(piece)
                await asyncio.sleep(0)  # others come between
            async with asyncio.timeout(self._read_timeout):
                await exchange.end()
        except TimeoutError:
            self._metrics.count(SLOW_READERS)
            exchange.abort()
        except Exception:
            exchange.abort()  # a part of an answer is no whole one
            raise

    def _part(self, call: Call, number: int, request: GenerationRequest) -> PromptPart:
        text = ""
        if call.shown.echo:
            sent = call.texts[number]
            text = self._decode_prompt(request.input_ids) if sent is None else sent
        return PromptPart(number * call.n, call.n, request.input_ids, text)

    async def _run(
        self,
        exchange: Exchange,
        call: Call,
        reply: Reply,
        caller: Caller,
        make: Make,
        take: Write,
    ) -> Sequence[Completion]:
        """Serve all prompts, and pass their events on as they come; return the completions."""
        deadline = exchange.deadline
        readers: list[Reader] = []
        try:
            async with asyncio.timeout(None) as timeout:
                with contextlib.ExitStack() as attached:
                    lives: list[LiveRequest] = []
                    for ask in _asks(call, reply.id, (reply.id, exchange.id), make):
                        live = await self._admission.open(
                            ask,
                            caller,
                            deadline,
                            door="http",
                            traceparent=exchange.traceparent if self._admission.traces else None,
                            operation=reply.operation,
                        )
                        readers.append(attached.enter_context(live.reader(timeout, deadline)))
                        lives.append(live)
                    await _pump_all(readers, take)
        except TimeoutError:
            error = next(reader.error for reader in readers if reader.error is not None)
            if isinstance(error, SlowReader):
                self._metrics.count(SLOW_READERS)
                exchange.abort()
            raise error from None
        completions = [_completion(live) for live in lives]
        if call.shown.output:
            return completions
        return [replace(one, completion_tokens=0) for one in completions]


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces that a slow client can take in time."""
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            yield part[start : start + _PIECE_BYTES]


def _asks(
    call: Call, call_id: str, call_ids: tuple[str, ...], make: Make
) -> Iterator[Callable[[RequestLimits], IncomingRequest]]:
    """Yield, for each prompt, a function that returns its ask; it ignores the limits."""
    for number, prompt in enumerate(call.prompts):
        message = inference_pb2.GenerateRequest()
        message.CopyFrom(call.message)
        message.request_id = call_id if len(call.prompts) == 1 else f"{call_id}-{number}"
        form, num_bytes = functools.partial(make, number), call.prompt_bytes[number]
        ask = IncomingRequest(
            message,
            prompt,
            num_bytes,
            form,
            is_whole=True,
            output=call.output,
            call_ids=call_ids,
        )
        yield functools.partial(_whatever, ask)


def _whatever(ask: IncomingRequest, _limits: RequestLimits) -> IncomingRequest:
    return ask


async def _pump_all(readers: Sequence[Reader], take: Write) -> None:
    """Pass on the events of all readers until each ends; raise the first error."""
    if len(readers) == 1:
        await readers[0].pass_on(take)
        return
    pumps = [asyncio.ensure_future(reader.pass_on(take)) for reader in readers]
    try:
        await asyncio.gather(*pumps)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _completion(live: LiveRequest) -> Completion:
    assert isinstance(live.outcome, Completion), "its stream has ended without an error"
    return live.outcome
