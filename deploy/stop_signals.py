"""Ctrl-C and SIGTERM: the first asks to stop, the second does not wait."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which SIGINT and SIGTERM mean the same, to be entered in the main thread.

    The first one calls what `deliver_to` was given, or raises KeyboardInterrupt
    where nothing was. The second ends this process at once; the system then
    ends Ray's, which do not outlive it.
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
        """Take the signals, again if need be: Ray takes SIGTERM for itself."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def deliver_to(self, stop: Callable[[], object]) -> None:
        """From now on the first signal calls `stop`, in the main thread."""
        self._stop = stop

    def stopping(self) -> None:
        """All is being stopped already: the first signal changes nothing any more."""
        self._stop = lambda: None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


class TermSignal:
    """SIGTERM to a process whose event loop is not in its main thread; made in the main thread.

    The main thread may be in C code for ever, where no Python handler runs: so the
    signal is heard through the socket that the interpreter writes to at once.
    """

    def __init__(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)

    async def heard(self) -> None:
        """Wait for the next one."""
        loop = asyncio.get_running_loop()
        while signal.SIGTERM not in await loop.sock_recv(self._ear, 64):
            pass
