"""A coroutine that continues in the caller that brings its input, without a task of its own.

A task would be woken in a later turn of the event loop, for each token of each stream. It would be
woken again when the token is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Protocol, Self


class Awaited(Protocol):
    """An object that a coroutine may await: `MORE`, or asyncio's future."""

    def done(self) -> bool:
        """Whether the wait is over."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Have `callback` called when it is done."""
        ...

    def cancel(self) -> bool:
        """Cancel the wait; returns False if it is done."""
        ...


class _More:
    """An awaitable that is always done: its coroutine looks for input, then awaits it again."""

    def __await__(self) -> Generator[Self, None, None]:
        yield self

    def done(self) -> bool:
        """Return True."""
        return True

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Do nothing: only `InlineCoroutine.go_on` tells that there may be more."""

    def cancel(self) -> bool:
        """Return True: its coroutine is not run again."""
        return True


MORE: Final = _More()
"""The object to await until there may be more to do."""


class InlineCoroutine:
    """A coroutine that runs whenever it is told to, without turns of the event loop.

    Nothing in the coroutine may need a task of its own, as `asyncio.timeout` and `asyncio.sleep(0)`
    do.

    Args:
        coroutine: awaits `MORE` and futures.
        may_rest: whether the coroutine may stop after a future that it awaits, until `go_on`.
            Otherwise it continues when the future is done. None: it may never stop.
    """

    def __init__(
        self, coroutine: Coroutine[Awaited, None, None], may_rest: Callable[[], bool] | None
    ) -> None:
        self._coroutine = coroutine
        self._may_rest = may_rest
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited: Awaited | None = None
        self._is_called = False  # when the awaited one is done

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for its end any more: it has ended, or was cancelled."""
        return self._ended.done()

    async def end(self) -> None:
        """Begin, and wait for the end; raise what the coroutine raises.

        A cancellation cancels the awaited future. If that is done already, a coroutine that may
        never rest is cancelled all the same, as a task is. A coroutine that may rest runs on until
        it awaits again, because its code after a future frees what it held. It must look at
        `is_over` before it begins anything else.
        """
        self._run()
        try:
            await self._ended
        except asyncio.CancelledError:
            awaited = self._awaited
            if awaited is not None and not awaited.cancel() and not self._is_called:
                self._run()  # it has rested since that was done, and gRPC frees what it held then
            raise

    def go_on(self) -> None:
        """Run the coroutine until it waits; if its awaited future is not done, run it later."""
        awaited = self._awaited
        if awaited is None or self._is_called or self._ended.done():
            return
        if awaited.done():
            self._run()
        else:
            self._call_when_done(awaited)

    def _run(self, _awaited: object = None) -> None:
        self._awaited, self._is_called = None, False
        try:
            if self._may_rest is None and self._ended.done():
                self._awaited = awaited = self._coroutine.throw(asyncio.CancelledError())
            else:
                self._awaited = awaited = self._coroutine.send(None)
        except StopIteration:
            self._end(None)
        except (Exception, asyncio.CancelledError) as error:
            self._end(error)
        else:
            if self._may_rest is None or not self._may_rest():
                self._call_when_done(awaited)

    def _call_when_done(self, awaited: Awaited) -> None:
        if awaited is not MORE:
            self._is_called = True
            awaited.add_done_callback(self._run)

    def _end(self, error: BaseException | None) -> None:
        if self._ended.done():  # it was cancelled
            return
        if error is None:
            self._ended.set_result(None)
        elif isinstance(error, asyncio.CancelledError):
            self._ended.cancel()
        else:
            self._ended.set_exception(error)
