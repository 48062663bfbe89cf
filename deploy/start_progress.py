"""The steps of a cluster's start, printed with the time that each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_NAME_WIDTH = 9
_TEXT_WIDTH = 58


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
    ended.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._started

    def line(self, text: str = "") -> None:
        """Write one line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[StartStep]:
        """Time a step. If it raises, its line says ``not done``."""
        started = time.monotonic()
        step = StartStep(lambda current: self._transient(name, current))
        step.say(text)
        try:
            yield step
        except BaseException:
            self._final(name, f"{step.text}: not done", time.monotonic() - started)
            raise
        self._final(name, step.text, time.monotonic() - started)

    def _transient(self, name: str, text: str) -> None:
        if self._live:
            self._stream.write(f"\r\x1b[K  {name:<{_NAME_WIDTH}} {text} ...")
            self._stream.flush()

    def _final(self, name: str, text: str, seconds: float) -> None:
        clear = "\r\x1b[K" if self._live else ""
        self.line(f"{clear}  {name:<{_NAME_WIDTH}} {text:<{_TEXT_WIDTH}} {seconds:6.1f} s")
