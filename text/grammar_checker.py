"""A check of unknown grammars, which may use up the stack or the memory, or never end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Final

from kvrelay.text.grammar import LEAST_BYTES, Constraint, GrammarError

_MODULE: Final = "kvrelay.text.grammar_process"
_START_SECONDS: Final = 60.0
_CHECK_SECONDS: Final = 4.0
"""The most seconds of one check by the clock; the process bounds its own CPU time more tightly."""


_REFUSALS: Final = {
    -signal.SIGPROF: "takes too long to compile",
    **dict.fromkeys(
        (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1), "takes too much memory to compile"
    ),
}
"""The problem that each exit status of the process tells about the grammar."""


class CheckerError(Exception):
    """The check gave no result: another time the grammar may pass."""


class GrammarChecker:
    """A process that compiles grammars: started when first needed, and again when it has died.

    It ends with the process that started it. Call all methods but `close` on one thread.

    Args:
        vocabulary: the vocabulary that grammars are checked for, as a tokenizer.json.
    """

    def __init__(self, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._unusable = ""
        """Why no grammar can be used with this vocabulary; empty: some can."""
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the checker; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def check(self, constraint: Constraint) -> int:
        """The bytes that the compiled grammar takes at first, if workers can use it.

        Raises:
            GrammarError: workers cannot use it, or the check takes too much.
            CheckerError: the process cannot be started, was ended by others, or got too little CPU
                time; or the checker is closed.
        """
        if self._unusable:
            raise GrammarError(self._unusable)
        if self._process is not None and self._process.poll() is not None:
            self._end()  # somebody has killed it while it had nothing to do
        if self._process is None:
            self._start()
        until = time.monotonic() + _CHECK_SECONDS
        try:
            self._send(_said(constraint))
            return self._take_verdict(until)
        except EOFError:
            raise _verdict_of(self._end()) from None
        except TimeoutError:
            self._end()
            raise CheckerError("takes too long by the clock to compile") from None
        except (OSError, ValueError):
            self._end()  # or the next grammar would get this one's answers
            raise

    def close(self) -> None:
        """End the process and any check that runs; start no more. Call `reap` afterwards."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def reap(self) -> None:
        """Wait for the process that `close` has ended. Call it on the thread that calls `check`."""
        if self._process is not None:
            self._end()

    def _take_verdict(self, until: float) -> int:
        """Return or raise the verdict in the answers, as far as they come.

        The process may end in between.
        """
        answers: dict[str, Any] = {}
        try:
            while "is_last" not in answers:
                answers |= self._receive(until)
        except (EOFError, TimeoutError):
            if "problem" not in answers:
                raise
            answers["is_last"] = True  # the search for the place was too much
        if answers["is_last"]:
            self._end()
        if "problem" in answers:
            raise GrammarError(answers["problem"], answers.get("place", ""))
        return max(int(answers["num_bytes"]), LEAST_BYTES)

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise CheckerError("no more grammars are checked")
            self._unread = b""
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                # Arenas take address space by the 64 MiB, which is what is bounded.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                start_new_session=True,  # the terminal's Ctrl-C is not for it
            )
        try:
            self._send(self._vocabulary)
            answer = self._receive(time.monotonic() + _START_SECONDS)
        except (EOFError, TimeoutError) as error:
            raise _has_ended(self._end()) from error
        if "unusable" in answer:
            self._end()
            self._unusable = f"the tokenizer is not fit for structured output: {answer['unusable']}"
            raise GrammarError(self._unusable)

    def _send(self, message: Any) -> None:
        """Write a line; raises `EOFError` if the process is gone."""
        assert self._process is not None
        assert self._process.stdin is not None
        left = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while left:
                left = left[self._process.stdin.write(left) :]
        except BrokenPipeError as error:
            raise EOFError from error

    def _receive(self, until: float) -> dict[str, Any]:
        """Read a line; raises `EOFError` if the process is gone, `TimeoutError` if it is late."""
        assert self._process is not None
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise EOFError
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> int:
        """End the process; return its exit status, even if it had ended before."""
        with self._lock:
            process, self._process = self._process, None
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            # It closes its pipes a moment before it can be waited for.
            status = process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        process.stdout.close()
        return status


def _said(constraint: Constraint) -> dict[str, Any]:
    return {
        "json_schema": constraint.json_schema,
        "regex": constraint.regex,
        "choice": list(constraint.choice),
        "grammar": constraint.grammar,
    }


def _verdict_of(status: int) -> GrammarError | CheckerError:
    """The verdict on a grammar after whose check the process has ended with `status`.

    Any other end, such as the kernel's for want of memory, tells nothing about the grammar. A
    grammar cannot take more than the process's own bounds, so others took that memory.
    """
    refusal = _REFUSALS.get(status)
    return GrammarError(refusal) if refusal is not None else _has_ended(status)


def _has_ended(status: int) -> CheckerError:
    cause = signal.strsignal(-status) if status < 0 else f"exit status {status}"
    return CheckerError(f"the process that checks grammars has ended: {cause}")
