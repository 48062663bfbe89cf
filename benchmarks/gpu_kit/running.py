"""Run a stage within its time, judge it, and tell it in a line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

GRACE_SECONDS = 10.0
"""For a stage without time left to stop what it has started."""
LEFT_BEHIND_SECONDS = 1.0
"""For what an ended stage has left behind to stop."""
_TESTS = re.compile(
    r"(?:\d+ (?:passed|failed|skipped|errors?|deselected|warnings?),? ?)+ in [\d.]+s"
)
_FAULT = re.compile(r"(FAILED|ERROR|E  |\w*(Error|Exception): )")
_FAULTS, _LAST_LINES, _WIDTH = 12, 4, 160
"""Of a failed stage's log, in the report."""
_FIGURE = "FIGURE "


class Outcome(StrEnum):
    """How a stage ended."""

    PASS = "PASS"  # noqa: S105
    FAIL = "FAIL"
    TIME = "TIME"
    """It ran out of time."""
    SKIP = "SKIP"
    """No time was left to run it."""
    NONE = "NONE"
    """It ran and has shown nothing: what it needs is not here."""


@dataclass(frozen=True)
class Result:
    """An ended stage."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    log: str = ""

    def lines(self) -> list[str]:
        """Tell the outcome, then figures, or why it failed, in few lines."""
        tests = _TESTS.findall(self.log)
        first = f"{self.outcome} {self.name} {self.seconds:.0f} s{', '.join(['', *tests[-1:]])}"
        logged = [line for line in self.log.splitlines() if line.strip()]
        figures = [line.removeprefix(_FIGURE) for line in logged if line.startswith(_FIGURE)]
        reason = [line for line in logged if line.startswith(f"{Outcome.NONE} ")]
        faults: list[str] = []
        if self.outcome in (Outcome.FAIL, Outcome.TIME):
            found = dict.fromkeys(line[:_WIDTH] for line in logged if _FAULT.match(line))
            faults = [*list(found)[:_FAULTS], *(line[:_WIDTH] for line in logged[-_LAST_LINES:])]
        indented = [f"     {line}" for line in (*figures, *reason)]
        return [first, *indented, *(f"     | {line}" for line in faults)]


class Sessions:
    """Stages that run, each in a session of its own."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, name: str, command: Sequence[str], seconds: float, log: Path) -> Result:
        """Run a stage's command, which is ended after `seconds`, with all that it has started."""
        begun, in_time = time.monotonic(), False
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._running.add(process)
            try:
                process.wait(seconds)
                in_time = True
            except subprocess.TimeoutExpired:
                pass
            finally:
                end_session(process, LEFT_BEHIND_SECONDS if in_time else GRACE_SECONDS)
                self._running.discard(process)
        text = log.read_text(errors="replace")
        outcome = judge(process.returncode, text) if in_time else Outcome.TIME
        return Result(name, outcome, time.monotonic() - begun, text)

    def end(self) -> None:
        """End all stages that run now: they are no children of a terminal's."""
        for process in tuple(self._running):
            end_session(process)


def end_session(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """Let a process and all of its session stop within `grace` seconds, then kill what is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while time.monotonic() < end:
            process.poll()  # reaps it: otherwise it would be there still
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(returncode: int, log: str) -> Outcome:
    """Judge a stage that ended: one that found no test has failed, one that skipped all is NONE."""
    if returncode:
        return Outcome.FAIL
    tests = _TESTS.findall(log)
    if re.search(rf"^{Outcome.NONE} ", log, re.MULTILINE):
        return Outcome.NONE
    if tests and "passed" not in tests[-1]:
        return Outcome.NONE
    return Outcome.PASS


class Report:
    """The lines of all stages, on the screen and in a folder, beside their logs.

    Args:
        folder: gets summary.txt, figures.jsonl and logs.tgz, and no other file.
        logs: the folder of logs.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self.logs = logs
        self.figures = folder / "figures.jsonl"
        self._summary = folder / "summary.txt"
        self._packed_logs = folder / "logs.tgz"
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for old in (self.figures, self._summary, self._packed_logs):
            old.unlink(missing_ok=True)

    def say(self, lines: Iterable[str]) -> None:
        """Tell lines together, and keep what is known should the machine go away."""
        with self._lock:
            text = "".join(f"{line}\n" for line in lines)
            print(text, end="", flush=True)
            with self._summary.open("a") as file:
                file.write(text)
            with tarfile.open(self._packed_logs, "w:gz") as tar:
                tar.add(self.logs, "logs")
