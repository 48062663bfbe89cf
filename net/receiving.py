"""Bounds on calls: on messages that arrive, on calls at once, and on answers that wait."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvrelay.net.allocator import LARGE_BYTES, Trimmer
from kvrelay.net.door_rules import ListenerRule, MethodAccess, MethodRule
from kvrelay.net.unread_answers import HangUps, UnreadAnswers

CallerOf = Callable[[Any], str]
"""A function that names the caller of a gRPC context."""


_RETRY_AFTER: Final = (("retry-after-ms", "1000"),)
_TOO_MANY: Final = "too many calls of this method are open"


class Receipts:
    """Messages that arrive at the same time.

    One more than `most` ends the one that waits longest, of the caller that has the most of them.

    Args:
        most: the most messages.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._receiving: dict[asyncio.Timeout, str] = {}  # with their callers, the oldest first

    @contextlib.asynccontextmanager
    async def bounded(self, caller: str, seconds: float) -> AsyncIterator[None]:
        """A context in which one message arrives; raises TimeoutError if it comes too late."""
        if len(self._receiving) >= self._most:
            self._end_one()
        try:
            async with asyncio.timeout(seconds) as bound:
                self._receiving[bound] = caller
                yield
        finally:
            self._receiving.pop(bound, None)

    def _end_one(self) -> None:
        [(greedy, _)] = Counter(self._receiving.values()).most_common(1)
        oldest = next(bound for bound, caller in self._receiving.items() if caller == greedy)
        del self._receiving[oldest]
        if not oldest.expired():
            oldest.reschedule(0)


class OpenCalls:
    """The open calls of one method, of each caller and of all.

    Args:
        rule: the method's rule.
        make_room: called when there are too many; may end one soon. None: one more is refused.
        hang_up: ends all calls of a caller soon, which is a connection; None: nobody's are ended.
            Whoever has less than half of its bound is spared.
    """

    def __init__(
        self,
        rule: MethodRule,
        make_room: Callable[[], None] | None = None,
        hang_up: Callable[[str], None] | None = None,
    ) -> None:
        self._rule = rule
        self._make_room = make_room
        self._hang_up = hang_up
        self._open: Counter[str] = Counter()
        self._num_open = 0

    @contextlib.contextmanager
    def one_more(self, caller: str) -> Iterator[str]:
        """A context in which a call is open; it gets the reason if the call must be refused."""
        if refusal := self._refusal(caller):
            yield refusal
            return
        self._open[caller] += 1
        self._num_open += 1
        try:
            yield ""
        finally:
            self._num_open -= 1
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    def _refusal(self, caller: str) -> str:
        of_a_caller, most = self._rule.most_of_a_caller, self._rule.most
        if of_a_caller is not None and self._open[caller] >= of_a_caller:
            return f"{of_a_caller} calls of this method are open, and a caller may have no more"
        if most is None or self._num_open < most:
            return ""
        if self._make_room is None:
            return _TOO_MANY
        self._make_room()
        if self._hang_up is not None:
            greedy, number = max(self._open.items(), key=itemgetter(1))
            least = of_a_caller // 2 if of_a_caller is not None else 0
            if number > self._open[caller] + 1 and number >= least:
                self._hang_up(greedy)
        # The one that ends is still counted: a few more may come meanwhile.
        return "" if self._num_open < 2 * most else _TOO_MANY


class BoundedCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """An interceptor that holds each call to its method's rule, then calls its handler.

    gRPC itself waits for ever, and logs a stack for each message that cannot be parsed. It reads
    more than about the first 64 KiB of a message only once somebody waits for it. Calls that end
    here have therefore cost no more. A method without a rule is not served.

    The handler alone holds the message: gRPC's own iterator would keep it after the call, until the
    garbage collector runs.

    Args:
        rule: the listener's.
        caller_of: names the caller of a call; it is called in the call's own task.
    """

    def __init__(self, rule: ListenerRule, caller_of: CallerOf) -> None:
        self._rules = rule.methods
        self._caller_of = caller_of
        hang_up = HangUps()
        self._unread = UnreadAnswers(hang_up)
        # Strangers end each other's receipts, and nobody else's.
        self._of_strangers = Receipts(rule.most_receiving_of_strangers)
        self._of_callers = Receipts(rule.most_receiving)
        self._open = {
            method: OpenCalls(
                one,
                partial(self._unread.end_oldest, method),
                hang_up if one.access is MethodAccess.ANYBODY else None,
            )
            for method, one in self._rules.items()
        }
        self._trimmer = Trimmer()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return a handler that keeps to the rule; None: the method is unknown."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        rule = self._rules.get(method)
        if handler is None or rule is None:
            return None
        if handler.request_streaming and rule.answer_seconds is None:
            return handler
        opened = self._open[method]

        async def serve(_requests: Any, context: grpc.aio.ServicerContext) -> None:
            caller = self._caller_of(context)
            waiting = partial(self._unread.waiting, context.peer(), method)
            patient = _PatientContext(context, waiting, rule, handler.response_serializer)
            with opened.one_more(caller) as refusal:
                if refusal:
                    code, trailers = grpc.StatusCode.RESOURCE_EXHAUSTED, _RETRY_AFTER
                    await context.abort(code, refusal, trailers)
                try:
                    if handler.request_streaming:
                        await self._converse(handler, rule, caller, patient)
                    else:
                        await self._serve(handler, rule, caller, patient)
                except BaseException as error:
                    _forget_locals(error)
                    raise

        # On the wire, a call with one message is a stream of one.
        return grpc.stream_stream_rpc_method_handler(serve)

    async def _serve(
        self,
        handler: grpc.RpcMethodHandler,
        rule: MethodRule,
        caller: str,
        context: _PatientContext,
    ) -> None:
        message = await self._receive(handler.request_deserializer, rule, caller, context)
        if message is grpc.aio.EOF:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(message, context))
            return
        answered = handler.unary_stream(message, context)
        del message  # the answer may take long
        if not inspect.isasyncgen(answered):
            await answered  # it writes to the context itself
            return
        async for response in answered:
            await context.write(response)

    async def _converse(
        self,
        handler: grpc.RpcMethodHandler,
        rule: MethodRule,
        caller: str,
        context: _PatientContext,
    ) -> None:
        """Serve a call with a stream of messages, until its time is over."""

        async def messages() -> AsyncIterator[Any]:
            parse = handler.request_deserializer
            while (one := await self._receive(parse, rule, caller, context)) is not grpc.aio.EOF:
                yield one

        try:
            async with asyncio.timeout(rule.stream_seconds):
                async for response in handler.stream_stream(messages(), context):
                    await context.write(response)
        except TimeoutError:
            detail = f"the call has lasted for {rule.stream_seconds} s"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, detail)

    async def _receive(
        self,
        parse: Callable[[bytes], Any] | None,
        rule: MethodRule,
        caller: str,
        context: _PatientContext,
    ) -> Any:
        """Receive and parse a message of the call; abort the call if it is late or invalid."""
        open_to_all = rule.access is MethodAccess.ANYBODY
        receipts = self._of_strangers if open_to_all else self._of_callers
        try:
            async with receipts.bounded(caller, rule.receive_seconds):
                raw = await context.read()
        except TimeoutError:
            self._trimmer.trim_soon()
            detail = "the call's message did not arrive in time"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, detail)
        if raw is grpc.aio.EOF:
            return raw
        num_bytes = len(raw)
        if num_bytes >= LARGE_BYTES:
            self._trimmer.trim_soon()
        if rule.most_bytes is not None and num_bytes > rule.most_bytes:
            del raw
            detail = f"the message has {num_bytes} bytes, and this method takes {rule.most_bytes}"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, detail)
        try:
            return parse(raw) if parse is not None else raw
        except DecodeError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"the message: {error}")


class _PatientContext:
    """A call's context whose writes and whose end are counted while they wait to be read.

    Where the rule gives no time for answers, their writes are passed on as they are: the handler
    watches its readers itself. The last status counts in any case.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        waiting: Callable[[int, float], contextlib.AbstractContextManager[None]],
        rule: MethodRule,
        serialize: Callable[[Any], bytes] | None,
    ) -> None:
        self._context = context
        self._waiting = waiting
        self._serialize = serialize
        self._seconds = rule.answer_seconds
        self.write = context.write if self._seconds is None and serialize is None else self._write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def _write(self, message: Any) -> None:
        answer = message if self._serialize is None else self._serialize(message)
        del message
        if self._seconds is None:
            await self._context.write(answer)
            return
        with self._waiting(len(answer), self._seconds), _ended_with_its_client():
            await self._context.write(answer)

    async def abort(self, *status: Any) -> None:
        """End the call with a status, which waits behind what its client has not read."""
        seconds = self._seconds or _STATUS_SECONDS
        with self._waiting(0, seconds), _ended_with_its_client():
            await self._context.abort(*status)


_STATUS_SECONDS: Final = 5.0
"""The time for the last status to be read, where the rule gives no time for answers."""


@contextlib.contextmanager
def _ended_with_its_client() -> Iterator[None]:
    """End the call as its client does, if the connection is gone: gRPC would log each."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _forget_locals(error: BaseException) -> None:
    """Free what the frames of an error hold, above all the message.

    gRPC keeps the error of an aborted call in that call's state, a cycle which lives until the
    garbage collector comes by: hundreds of MiB, where huge prompts are refused.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


async def _abort(context: Any, code: grpc.StatusCode, detail: str) -> NoReturn:
    await context.abort(code, detail)
    raise AssertionError("abort does not return")
