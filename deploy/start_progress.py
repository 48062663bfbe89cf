"""The steps of a cluster's start, printed with the time that each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TextIO

_NAME_WIDTH = 9
_TEXT_WIDTH = 58
_CLEAR = "\r\x1b[K"


class StartStep:
    """A step that runs; its latest text is shown beside its name."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.text = ""

    def say(self, text: str) -> None:
        """Replace the text beside the step's name."""
        self.text = text
        self._show(text)


class StartProgress:
    """The printer of one line for each step: its name, its text, its seconds.

    A terminal shows the line while the step runs; a file gets it once, when the step has
    ended. Where threads run steps at once, a terminal shows that which has last said something.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._started = time.monotonic()
        self._lock = RLock()  # the handler of a signal may write, too
        self._open: dict[object, str] = {}
        """The lines of the steps that run, the latest last."""

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._started

    def line(self, text: str = "") -> None:
        """Write one line."""
        with self._lock:
            clear = _CLEAR if self._live and self._open else ""
            self._write(f"{clear}{text}")

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[StartStep]:
        """Time a step. If it raises, its line says ``not done``."""
        started, key = time.monotonic(), object()
        step = StartStep(lambda current: self._transient(key, name, current))
        step.say(text)
        try:
            yield step
        except BaseException:
            self._final(key, name, f"{step.text}: not done", time.monotonic() - started)
            raise
        self._final(key, name, step.text, time.monotonic() - started)

    def _transient(self, key: object, name: str, text: str) -> None:
        with self._lock:
            self._open.pop(key, None)
            self._open[key] = f"  {name:<{_NAME_WIDTH}} {text} ..."
            self._show_open()
            self._stream.flush()

    def _final(self, key: object, name: str, text: str, seconds: float) -> None:
        with self._lock:
            clear = _CLEAR if self._live else ""
            del self._open[key]
            self._write(f"{clear}  {name:<{_NAME_WIDTH}} {text:<{_TEXT_WIDTH}} {seconds:6.1f} s")

    def _write(self, line: str) -> None:
        """Write a line, and below it the latest step that runs."""
        self._stream.write(line + "\n")
        self._show_open()
        self._stream.flush()

    def _show_open(self) -> None:
        if self._live and self._open:
            self._stream.write(_CLEAR + list(self._open.values())[-1])
