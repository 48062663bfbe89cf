"""Ctrl-C and SIGTERM: the first asks the process to stop, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from kvrelay.deploy.start_progress import StartProgress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context that handles SIGINT and SIGTERM alike; enter it in the main thread.

    The first signal calls the function given to `deliver_to`, or raises KeyboardInterrupt if there
    is none. The second ends this process at once; the system then ends Ray's processes.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._stop: Callable[[], object] | None = None
        self.received: signal.Signals | None = None
        """The first signal that came."""

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Set the handlers. Call it again after Ray has started, which sets its own."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def deliver_to(self, stop: Callable[[], object]) -> None:
        """Let the first signal call `stop`, in the main thread, from now on."""
        self._stop = stop

    @contextmanager
    def cancelling_this_task(self) -> Iterator[None]:
        """Open a context in which the first signal cancels the task that opens it.

        Afterwards the first signal only sets `received`: the event loop is about to end.
        """
        task = asyncio.current_task()
        assert task is not None
        self.deliver_to_loop(task.cancel)
        try:
            yield
        finally:
            self.stopping()

    def deliver_to_loop(self, stop: Callable[[], object]) -> None:
        """Let the first signal call `stop` on the running event loop, from now on."""
        loop = asyncio.get_running_loop()
        self.deliver_to(lambda: loop.call_soon_threadsafe(stop))

    def stopping(self) -> None:
        """Let the first signal only set `received` from now on."""
        self._stop = lambda: None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


@contextmanager
def starting(progress: StartProgress) -> Iterator[StopSignals]:
    """Open a context in which a command starts: a signal before it is ready ends it, and says so.

    The process then exits with 128 + the signal's number.
    """
    with StopSignals() as signals:
        try:
            yield signals
        except (KeyboardInterrupt, asyncio.CancelledError):
            progress.line("Stopped before it was ready.")
            sys.exit(128 + (signals.received or signal.SIGINT))


class TermSignal:
    """The receipt of SIGTERM in an event loop outside the main thread; make it in the main thread.

    The handler does nothing: the main thread may be in C code for long, and then runs no Python
    handler. But the interpreter writes the signal's number to a socket at once, and the event loop
    reads it there.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    async def received(self) -> None:
        """Wait for the next SIGTERM."""
        loop = asyncio.get_running_loop()
        while signal.SIGTERM not in await loop.sock_recv(self._reader, 64):
            pass
