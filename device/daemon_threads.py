"""Threads that the end of the process does not wait for, because their calls may hang forever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class DaemonThreads:
    """A pool of threads, like `ThreadPoolExecutor`, which the interpreter would join at its end.

    Args:
        number: of threads.
        name: their name.
    """

    def __init__(self, number: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{one}", daemon=True)
            for one in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> Future[_Result]:
        """Call a function on one of the threads, after the earlier ones."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def close(self) -> None:
        """End the threads after the work that was submitted. Waits for nothing."""
        for _ in self._threads:
            self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
