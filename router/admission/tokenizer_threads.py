"""Threads for work on texts, which must not stop the event loop, and a bound on their bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from kvrelay.router.errors import TextQueueFull

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_LANES: Final = ((64 << 10, 2), (1 << 20, 1), (None, 1))
"""Bytes of a text up to which it belongs to a lane, and the lane's threads: a short text does
not wait for a long one. To tokenize takes much memory, so long ones do it one by one."""


class _Lane:
    """Threads for texts of up to so many bytes; None: of any length."""

    def __init__(self, bound: int | None, threads: int) -> None:
        self.bound = bound
        self.threads = ThreadPoolExecutor(threads, "kvrelay-text")
        self.held_bytes = 0
        """Of the texts that are being worked on, or wait for it."""

    def forget(self, num_bytes: int) -> None:
        """The work on a text has ended."""
        self.held_bytes -= num_bytes


class TextThreads:
    """Runs functions on texts in threads; refuses more when it holds too many bytes.

    Call it on one event loop.

    Args:
        most_bytes: of all texts of a lane together, that are being worked on or wait for it; a
            single text may have more. Each lane has as many, so that long texts that fill theirs
            do not keep short ones out.
        retry_after_ms: when a client that is refused should try again.
    """

    def __init__(self, most_bytes: int, retry_after_ms: int) -> None:
        self._most_bytes = most_bytes
        self._retry_after_ms = retry_after_ms
        self._lanes = [_Lane(bound, threads) for bound, threads in _LANES]

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that are being worked on, or wait for it."""
        return sum(lane.held_bytes for lane in self._lanes)

    async def run(
        self, num_bytes: int, work: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """The result of `work(*args, **kwargs)`, run in a thread.

        If the caller is cancelled, work that has not begun never does. Work that has begun goes
        on, and its bytes count until it ends.

        Args:
            num_bytes: of the text.
            work: called in a thread.
            args: of the work.
            kwargs: of the work.

        Raises:
            TextQueueFull: too many bytes are here already.
        """
        lane = next(one for one in self._lanes if one.bound is None or num_bytes <= one.bound)
        if lane.held_bytes and lane.held_bytes + num_bytes > self._most_bytes:
            raise TextQueueFull(lane.held_bytes, self._retry_after_ms)
        lane.held_bytes += num_bytes
        loop = asyncio.get_running_loop()

        # Emptied when it is over: an executor keeps what was cancelled until its turn.
        job = [partial(work, *args, **kwargs)]
        del args, kwargs

        def ended(_: Future[ResultT]) -> None:
            job.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lane.forget, num_bytes)

        future = lane.threads.submit(lambda: job.pop()())
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops the work that has not begun, and takes no more."""
        for lane in self._lanes:
            lane.threads.shutdown(wait=False, cancel_futures=True)
