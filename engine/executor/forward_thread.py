"""The thread that launches steps and reads their results.

On a CPU a step has ended when it is launched. A GPU works by itself: the next step is launched
while one runs. A second thread sleeps until the results of the oldest step are on the host. Only
one thread launches, reads results and changes token states.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kvrelay.device.device_streams import DeviceEvent, ImmediateStreams, Streams
from kvrelay.device.thread_end import CLOSE_SECONDS, ended_within, seconds_until
from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.engine.executor.pipeline import StepPipeline
from kvrelay.engine.executor.step import Executor, LaunchedStep, Step, StepEnded

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")


class ForwardThread(Generic[RequestT]):
    """Steps computed in order, away from the engine thread, which stays responsive.

    Args:
        executor: computes the steps.
        on_end: called with each step's end, on this thread.
        on_failure: called once, on this thread, if it must give up.
        streams: that the executor launches on.
    """

    def __init__(
        self,
        executor: Executor,
        on_end: Callable[[StepEnded[RequestT]], None],
        on_failure: Callable[[str], None],
        streams: Streams | None = None,
    ) -> None:
        self._streams = streams or ImmediateStreams()
        self._pipeline: StepPipeline[RequestT] = StepPipeline(executor)
        self._on_end = on_end
        self._on_failure = on_failure
        self.work = WorkInProgress()
        """The steps that were launched and have not ended."""
        self._queue: queue.SimpleQueue[Step[RequestT] | LaunchedStep[RequestT] | None] = (
            queue.SimpleQueue()
        )
        """Steps to launch, and launched steps whose results are on the host."""
        self._waiter: _Waiter[RequestT] = _Waiter(self._streams, self._queue.put)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    def launch(self, step: Step[RequestT]) -> None:
        """Compute a step after those launched before it."""
        self.work.begin(step.most_tokens, step.number)
        self._queue.put(step)

    @property
    def has_ended(self) -> bool:
        """Whether no step uses the pools any more, after `close`."""
        return not self._thread.is_alive()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Compute what was launched, then end; give up what has not ended after `seconds`.

        A forward that hangs goes on to use the pools, which stay as long as the process. The steps
        behind it are never launched, and their ends are never reported.
        """
        ends_at = time.monotonic() + seconds
        self._queue.put(None)
        if ended_within(self._thread, seconds):
            self._waiter.close(seconds_until(ends_at))
            return
        self._given_up.set()
        logger.error("forwards have not ended for %g s: %d are given up", seconds, self.work.count)

    def _run(self) -> None:
        _name_for_the_kernel("forward")
        try:
            self._streams.enter_thread()
            while (item := self._queue.get()) is not None and not self._given_up.is_set():
                if isinstance(item, LaunchedStep):
                    self._tell(self._pipeline.finish(item))
                    continue
                self._tell(self._pipeline.launch(item))
                latest = self._pipeline.latest
                if latest is not None:
                    self._waiter.wait_for(latest)
            self._tell(self._pipeline.finish_all())
        except Exception as error:
            logger.exception("the forward thread gives up")
            if not self._given_up.is_set():
                self._on_failure(f"{type(error).__name__}: {error}")

    def _tell(self, ends: Iterable[StepEnded[RequestT]]) -> None:
        for ended in ends:
            self.work.end()
            if not self._given_up.is_set():
                self._on_end(ended)


def _name_for_the_kernel(name: str) -> None:
    """Set the name that `top -H` shows for this thread and the kernel threads that it starts."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


class _Waiter(Generic[RequestT]):
    """A thread, started when first needed, that reports when a step's results are on the host."""

    def __init__(
        self, streams: Streams, on_home: Callable[[LaunchedStep[RequestT]], object]
    ) -> None:
        self._streams = streams
        self._on_home = on_home
        self._launched: queue.SimpleQueue[LaunchedStep[RequestT] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, launched: LaunchedStep[RequestT]) -> None:
        """Call `on_home` with `launched` when its event has passed, or has failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        self._launched.put(launched)

    def close(self, seconds: float) -> None:
        """End the thread, if there is one; it stays if what it waits for hangs."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        wait = self._enter_and_wait
        while (launched := self._launched.get()) is not None:
            try:
                wait(launched.home)
            except Exception:  # whoever reads the results hears of it, too
                logger.debug("work on the device has failed", exc_info=True)
            wait = _wait
            self._on_home(launched)

    def _enter_and_wait(self, event: DeviceEvent) -> None:
        self._streams.enter_thread()
        event.wait()


def _wait(event: DeviceEvent) -> None:
    event.wait()
