"""A coroutine that goes on at once when what it waits for has come, in the turn of who brought it.

A task would wait for a turn of its own, and be woken for it: for each token of each stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, Self


class Awaited(Protocol):
    """What a coroutine may wait for: a `Signal`, or asyncio's future."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Has this called when it has come."""
        ...

    def cancel(self) -> object:
        """Nobody waits for it any more."""
        ...


class Signal:
    """Awaited by one coroutine that `run_eagerly` runs, until it is `given`.

    It is not stored: look at the state, then await it with no other `await` in between.
    """

    def __init__(self) -> None:
        self._waiting: Callable[[Signal], object] | None = None

    def __await__(self) -> Generator[Self, None, None]:
        yield self

    def add_done_callback(self, callback: Callable[[Signal], object], /) -> None:
        """Has this called when it is given; one at a time, and once."""
        self._waiting = callback

    def cancel(self) -> None:
        """Has nothing called."""
        self._waiting = None

    def give(self) -> None:
        """Runs the coroutine that waits, if one does, until it waits again or ends."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting(self)


async def run_eagerly(coroutine: Coroutine[Awaited, None, None]) -> None:
    """Runs a coroutine to its end; raises what it raises. A cancellation cancels what it waits for.

    Nothing in the coroutine may need a task of its own, as `asyncio.timeout` and `asyncio.sleep(0)`
    do.
    """
    run = _Run(coroutine)
    run.go_on()
    try:
        await run.ended
    except asyncio.CancelledError:
        run.cancel()
        raise


class _Run:
    """Does for a coroutine what a task does, without turns of the event loop."""

    def __init__(self, coroutine: Coroutine[Awaited, None, None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coroutine = coroutine
        self._awaited: Awaited | None = None

    def go_on(self, _awaited: object = None) -> None:
        """Runs it until it waits or ends."""
        error: BaseException | None = None
        try:
            self._awaited = awaited = self._coroutine.send(None)
            awaited.add_done_callback(self.go_on)
            return
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as raised:
            error = raised
        self._end(error)

    def cancel(self) -> None:
        """Cancels what it waits for; its end is told nobody."""
        if self._awaited is not None:
            self._awaited.cancel()

    def _end(self, error: BaseException | None) -> None:
        self._awaited = None
        if self.ended.done():  # it was cancelled
            return
        if error is None:
            self.ended.set_result(None)
        elif isinstance(error, asyncio.CancelledError):
            self.ended.cancel()
        else:
            self.ended.set_exception(error)
