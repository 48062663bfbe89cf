"""Threads for work on texts, which must not stop the event loop, and a bound on their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from kvrelay.router.errors import TextQueueFull

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_LANES: Final = ((64 << 10, 2), (1 << 20, 1), (None, 1))
"""Bytes of a text up to which it belongs to a lane, and the lane's threads: a short text does
not wait for a long one. To tokenize takes much memory, so long ones do it one by one."""


class TextThreads:
    """Runs functions on texts in threads; refuses more when it holds too many bytes.

    Call it on one event loop.

    Args:
        most_bytes: of all texts together that are being worked on or wait for it; a single
            text may have more.
        retry_after_ms: when a client that is refused should try again.
    """

    def __init__(self, most_bytes: int, retry_after_ms: int) -> None:
        self._most_bytes = most_bytes
        self._retry_after_ms = retry_after_ms
        self._bytes = 0
        self._lanes = [
            (bound, ThreadPoolExecutor(threads, "kvrelay-text")) for bound, threads in _LANES
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of the texts that are being worked on, or wait for it."""
        return self._bytes

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
        if self._bytes and self._bytes + num_bytes > self._most_bytes:
            raise TextQueueFull(self._bytes, self._retry_after_ms)
        self._bytes += num_bytes
        loop = asyncio.get_running_loop()

        def ended(_: Future[ResultT]) -> None:
            loop.call_soon_threadsafe(self._forget, num_bytes)

        future = self._lane(num_bytes).submit(work, *args, **kwargs)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops the work that has not begun, and takes no more."""
        for _, threads in self._lanes:
            threads.shutdown(wait=False, cancel_futures=True)

    def _lane(self, num_bytes: int) -> ThreadPoolExecutor:
        return next(t for bound, t in self._lanes if bound is None or num_bytes <= bound)

    def _forget(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
