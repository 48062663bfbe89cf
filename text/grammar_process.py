"""The process that checks whether grammars can be used; a grammar may end it.

`GrammarChecker` starts it. It reads lines of JSON: the vocabulary, as a tokenizer.json, then one
grammar after the other. It answers each grammar by a line: the problem, or the bytes that the
grammar takes. After a problem in a schema another line tells its place. It ends when its input
ends, so with its parent.

A grammar is compiled, and its masks are computed along some outputs that it allows. So what would
fail in the middle of an output, on a worker, shows here.

A check beyond its bounds ends the process: the stack by SIGSEGV, memory by SIGABRT, time by
SIGPROF. All bounds are tighter than those of the workers that compile.
"""

from __future__ import annotations

import contextlib
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
from random import Random
from typing import Any, ClassVar, Final

from llguidance import LLMatcher, LLTokenizer

from kvrelay.text.grammar import (
    WORKER_STACK_BYTES,
    GrammarCompiler,
    GrammarError,
    raise_problem,
    stack_of,
    trim_heap,
)

MOST_CPU_SECONDS: Final = 1.0
"""The most CPU seconds of one check, with the search for its problem's place."""
_PLACE_CPU_SECONDS: Final = 0.5
"""CPU seconds after which no further part of a schema is tried."""
_MARKS: Final = b'"{}[]:,'
_WALKS: Final = 16
_WALK_TOKENS: Final = 48
_WALK_CPU_SECONDS: Final = 0.25
"""The outputs whose masks are computed, the most tokens of each, and the CPU seconds for all."""
_FEWEST_MASKS: Final = 25
"""The fewest masks in that time: slower ones would hold up the steps of others."""
_FEW: Final = 256
"""The most tokens of which each is as likely as the others."""
_MOST_GROWTH_BYTES: Final = 64 << 20
_MOST_LEFT_BYTES: Final = 128 << 20
"""The most bytes that checks may leave behind, before the process asks to be replaced."""
_STACK_BYTES: Final = WORKER_STACK_BYTES // 8
_SHARE: Final = 0.5
"""The work that a grammar may take, as a share of a worker's: what passes here passes there."""


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
        vocabulary = json.loads(sys.stdin.readline())
        self._compiler = GrammarCompiler(lambda: LLTokenizer(vocabulary), _SHARE)
        self._held_bytes = _held_bytes()
        self._first_bytes = 0

    def run(self) -> None:
        """Answer until the input ends, or until too much memory is left behind."""
        try:
            self._walks = _Walks(self._compiler.tokenizer)
            self._compiler.compile(_Wanted(regex=r"[\s\S]"))
        except Exception as error:
            self._answer({"unusable": str(error)})
            return
        with contextlib.suppress(GrammarError):  # a vocabulary may lack it
            self._compiler.compile(_Wanted(regex="a"))
        self._first_bytes = _address_bytes()
        self._answer({"ready": True})
        for line in sys.stdin:
            wanted = _Wanted(**json.loads(line))
            resource.setrlimit(resource.RLIMIT_AS, _soft(_address_bytes() + _MOST_GROWTH_BYTES))
            signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
            self._check(wanted)
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, _soft(resource.RLIM_INFINITY))
            trim_heap()
            is_last = _address_bytes() > self._first_bytes + _MOST_LEFT_BYTES
            self._answer({"is_last": is_last})
            if is_last:
                return

    def _check(self, wanted: _Wanted) -> None:
        until = time.process_time() + _PLACE_CPU_SECONDS
        before = self._held_bytes()
        try:
            matcher = self._compiler.compile(wanted)
            num_bytes = self._held_bytes() - before
            self._walks.check(matcher)
            self._answer({"num_bytes": max(num_bytes, 0)})
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


class _Walks:
    """Some outputs of a grammar, the same each time, which go to its end or deep into it.

    Args:
        tokenizer: the vocabulary.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._marks = 0
        """The tokens of JSON's marks alone, such as those that end a string, as bits."""
        for token_id in range(self._vocab_size):
            text = tokenizer.decode_bytes([token_id])
            if text and not text.strip(_MARKS):
                self._marks |= 1 << token_id

    def check(self, matcher: LLMatcher) -> None:
        """Raise `GrammarError` if a mask on the way takes too much."""
        until, masks = time.process_time() + _WALK_CPU_SECONDS, 0
        for number in range(_WALKS):
            walker, random = matcher.deep_copy(), Random(number)  # noqa: S311 - no secret
            for _ in range(_WALK_TOKENS):
                allowed = int.from_bytes(walker.compute_bitmask(), "little")
                raise_problem(walker)
                masks += 1
                if time.process_time() > until:
                    if masks < _FEWEST_MASKS:
                        raise GrammarError("allows so much at once that it takes too much work")
                    return
                if walker.is_stopped() or not allowed:
                    break
                walker.consume_token(self._choose(allowed, random))
                raise_problem(walker)

    def _choose(self, allowed: int, random: Random) -> int:
        """A token that is allowed: a mark every other time, so that texts come to an end."""
        marks = allowed & self._marks
        among = marks if marks and random.random() < 0.5 else allowed
        if (number := among.bit_count()) <= _FEW:
            for _ in range(random.randrange(number)):
                among &= among - 1
            return _lowest_bit(among)
        begin = random.randrange(self._vocab_size)
        after = among >> begin
        return _lowest_bit(after) + begin if after else _lowest_bit(among)


def _lowest_bit(number: int) -> int:
    return (number & -number).bit_length() - 1


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
