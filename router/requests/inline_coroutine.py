"""A coroutine that goes on in the turn of who brings what it waits for.

A task would wait for a turn of its own, and be woken for it: for each token of each stream, and
again when that is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Protocol, Self


class Awaited(Protocol):
    """What a coroutine may wait for: `MORE`, or asyncio's future."""

    def done(self) -> bool:
        """Whether to go on."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Has this called when it is done."""
        ...

    def cancel(self) -> bool:
        """Nobody waits for it any more; returns False if it is done."""
        ...


class _More:
    """Is done whenever somebody asks: who awaits it looks at what there is, and awaits it again."""

    def __await__(self) -> Generator[Self, None, None]:
        yield self

    def done(self) -> bool:
        """True."""
        return True

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Nothing: only `EagerRun.go_on` tells that there may be more."""

    def cancel(self) -> bool:
        """True: what awaits it is not run again."""
        return True


MORE: Final = _More()
"""Await it until there is more to do."""


class EagerRun:
    """Runs a coroutine whenever it is told to, without turns of the event loop.

    Nothing in the coroutine may need a task of its own, as `asyncio.timeout` and `asyncio.sleep(0)`
    do.

    Args:
        coroutine: awaits `MORE` and futures.
        may_rest: whether nobody misses what the coroutine does after a future that it awaits, until
            it is told to go on; else it goes on when the future is done. None: never.
    """

    def __init__(
        self, coroutine: Coroutine[Awaited, None, None], may_rest: Callable[[], bool] | None
    ) -> None:
        self._coroutine = coroutine
        self._may_rest = may_rest
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited: Awaited | None = None
        self._is_called = False  # when that is done

    @property
    def is_over(self) -> bool:
        """Nobody waits for its end any more: it has come, or was cancelled."""
        return self._ended.done()

    async def end(self) -> None:
        """Begins, and waits for the end; raises what the coroutine raises.

        A cancellation cancels what the coroutine waits for. If that is done already, a coroutine
        that never rests is cancelled all the same, as a task is. One that may rest goes on until it
        waits again, because what it does after a future frees what it held: it must look at
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
        """Runs the coroutine until it waits, unless what it waits for is not done; then later."""
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
