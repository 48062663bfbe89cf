"""A terminal for a command, and what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte

COLUMNS, LINES = 80, 24


class Terminal:
    """A process that runs in a terminal of 80 x 24, and what its terminal shows."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.deploy", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=inherited | environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.written = b""
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.shown)

    @property
    def colours(self) -> set[str]:
        return {cell.fg for row in self._screen.buffer.values() for cell in row.values()}

    @property
    def cells(self) -> list[list[Any]]:
        """Each line's characters, as pyte has them: with colours."""
        return [[self._screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)]

    def read_until(self, seen: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            left = deadline - time.monotonic()
            assert left > 0, self.text
            if select.select([self._ours], [], [], left)[0] and not self._take():
                assert seen(), self.text
                return

    def _take(self) -> bool:
        """Show what was written; returns whether more may come."""
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the process has left the terminal
            return False
        self.written += piece
        self._stream.feed(piece)
        return bool(piece)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._ours, text.encode())

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        while self._take():
            pass
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
