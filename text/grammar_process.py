"""The process that checks whether grammars can be compiled; a grammar may end it.

`GrammarChecker` starts it. It reads lines of JSON: the special tokens of the vocabulary, then one
grammar after the other. It answers each grammar by a line: the problem, or the bytes that the
grammar takes. After a problem in a schema another line tells its place. It ends when its input
ends, so with its parent.

A check beyond its bounds ends the process: the stack by SIGSEGV, memory by SIGABRT, time by
SIGPROF. All bounds are tighter than those of the workers that compile.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from kvrelay.text.grammar import (
    WORKER_STACK_BYTES,
    GrammarCompiler,
    GrammarError,
    byte_vocabulary,
    stack_of,
)

MOST_CPU_SECONDS: Final = 1.0
"""The most CPU seconds of one check, with the search for its problem's place."""
_PLACE_CPU_SECONDS: Final = 0.5
"""CPU seconds after which no further part of a schema is tried."""
_MOST_GROWTH_BYTES: Final = 32 << 20
_MOST_LEFT_BYTES: Final = 64 << 20
"""The most bytes that checks may leave behind, before the process asks to be replaced."""
_STACK_BYTES: Final = WORKER_STACK_BYTES // 8
_FUEL: Final = 0.5
"""A share of a worker's fuel: its vocabulary may need more, but what passes here passes there."""


@dataclass(frozen=True)
class _Wanted:
    """A `Constraint`, as it was received."""

    json_schema: str | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None


class _Process:
    """A loop that answers the lines of standard input into the file `answers`."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._compiler = GrammarCompiler(byte_vocabulary(json.loads(sys.stdin.readline())), _FUEL)
        self._compiler.compile(_Wanted(regex="a"))
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
        self._held_bytes = _held_bytes()
        self._first_bytes = _address_bytes()

    def run(self) -> None:
        """Answer until the input ends, or until too much memory is left behind."""
        self._answer({"ready": True})
        for line in sys.stdin:
            wanted = _Wanted(**json.loads(line))
            resource.setrlimit(resource.RLIMIT_AS, _soft(_address_bytes() + _MOST_GROWTH_BYTES))
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
            self._check(wanted)
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, _soft(resource.RLIM_INFINITY))
            self._trim(0)
            is_last = _address_bytes() > self._first_bytes + _MOST_LEFT_BYTES
            self._answer({"is_last": is_last})
            if is_last:
                return

    def _check(self, wanted: _Wanted) -> None:
        until = time.process_time() + _PLACE_CPU_SECONDS
        before = self._held_bytes()
        try:
            matcher = self._compiler.compile(wanted)
            self._answer({"num_bytes": max(self._held_bytes() - before, 0)})
            del matcher
        except GrammarError as error:
            self._answer({"problem": str(error)})
            if wanted.json_schema is not None:
                place = self._compiler.place_of(
                    str(error), wanted.json_schema, lambda: time.process_time() < until
                )
                self._answer({"place": place})

    def _answer(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")


class _Mallinfo(ctypes.Structure):
    """glibc's `mallinfo2`, as far as it is read."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _held_bytes() -> Callable[[], int]:
    """Return a function for the allocated memory: exact with glibc, which has one arena here."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return _address_bytes
    ask.restype = _Mallinfo

    def held() -> int:
        info = ask()
        return int(info.uordblks) + int(info.hblkhd)

    return held


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _soft(limit: int) -> tuple[int, int]:
    """A limit of address space that can be raised again."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or (limit != resource.RLIM_INFINITY and limit < hard):
        return limit, hard
    return hard, hard


def _run(answers: int) -> None:
    try:
        _Process(answers).run()
    except BaseException:  # a MemoryError, perhaps: the parent sees the end
        os._exit(1)


def main() -> None:
    """Check grammars, and answer on standard output."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # a library's prints are no answers
    with stack_of(_STACK_BYTES):
        thread = threading.Thread(target=_run, args=(answers,))
        thread.start()
    thread.join()


if __name__ == "__main__":
    main()
