"""Threads for work on texts, which must not block the event loop: callers in turn, and a bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from kvrelay.router.errors import TextQueueFull
from kvrelay.router.turns import FairTurns

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_LANES: Final = ((64 << 10, 2), (1 << 20, 1), (None, 1))
"""The lanes: the most bytes of a text, and the lane's threads.

A short text does not wait for a long one. To tokenize takes much memory, so long texts are
tokenized one by one.
"""


class _Lane:
    """The threads for texts of up to `bound` bytes; None: of any length."""

    def __init__(self, bound: int | None, threads: int, most_bytes: int) -> None:
        self.bound = bound
        self.threads = ThreadPoolExecutor(threads, "kvrelay-text")
        self.turns = FairTurns(threads, most_bytes)


class TextThreads:
    """Threads that run functions on texts, with a bound on the bytes that wait.

    Each lane serves one text of each caller in turn. Call it on one event loop.

    Args:
        most_bytes: the most bytes of all texts of a lane that are being worked on or wait; a single
            text may have more. Each lane has this bound of its own, so that long texts do not keep
            short ones out. Whoever has most of them makes room for others.
        retry_after_ms: the time after which a refused client should try again.
    """

    def __init__(self, most_bytes: int, retry_after_ms: int) -> None:
        self._retry_after_ms = retry_after_ms
        self._lanes = [_Lane(bound, threads, most_bytes) for bound, threads in _LANES]

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that are being worked on, or wait for a thread."""
        return sum(lane.turns.held for lane in self._lanes)

    async def run(
        self,
        caller: str,
        num_bytes: int,
        work: Callable[P, ResultT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Run `work(*args, **kwargs)` in a thread; return its result.

        If the caller is cancelled, work that has not begun never does. Work that has begun goes
        on, and its bytes count until it ends.

        Args:
            caller: the name in whose turn the work is done.
            num_bytes: the text's size.
            work: called in a thread.
            args: the arguments of the work.
            kwargs: the keyword arguments of the work.

        Raises:
            TextQueueFull: the lane has too many bytes, and no caller more of them than this one.
        """
        lane = next(one for one in self._lanes if one.bound is None or num_bytes <= one.bound)
        turns, loop = lane.turns, asyncio.get_running_loop()

        # Emptied at the end: frames and executors keep what is over.
        job = [partial(work, *args, **kwargs)]
        del args, kwargs
        try:
            await turns.begin(
                caller, num_bytes, lambda: TextQueueFull(turns.held, self._retry_after_ms)
            )
        except BaseException:
            job.clear()
            raise

        def ended(_: Future[ResultT]) -> None:
            job.clear()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turns.end, num_bytes)

        future = lane.threads.submit(lambda: job.pop()())
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop the work that has not begun, and take no more."""
        for lane in self._lanes:
            lane.threads.shutdown(wait=False, cancel_futures=True)
