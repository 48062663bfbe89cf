"""FlashInfer's kernels are compiled beside stages that need none of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_kit.running import end_session

PROCESSES = 3


class Compiling:
    """Processes that compile modules of FlashInfer; those that are compiled already take no time.

    Args:
        into: as `--into` of `kernels`.
        logs: the folder that gets what they print.
    """

    def __init__(self, into: Path | None, logs: Path) -> None:
        self._into = ["--into", str(into)] if into is not None else []
        self._logs = logs
        self._begun: set[str] = set()
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, names: Iterable[str]) -> None:
        """Begin to compile those that were not begun, the first ones first."""
        new = [name for name in dict.fromkeys(names) if name not in self._begun]
        self._begun.update(new)
        jobs = max(1, ((os.cpu_count() or 1) - 4) // PROCESSES)
        environment = {**os.environ, "MAX_JOBS": str(jobs)}
        module = [sys.executable, "-m", "benchmarks.gpu_kit.kernels", *self._into]
        for share in filter(None, (new[at::PROCESSES] for at in range(PROCESSES))):
            with (self._logs / f"compiling-{share[0]}.log").open("wb") as log:
                self._running.append(
                    subprocess.Popen(  # noqa: S603
                        [*module, *share],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )

    def wait(self, seconds: float) -> list[str]:
        """Wait so long at most, then end what still runs; returns what there is to tell.

        A module that is missing then is compiled where it is used.
        """
        if not self._running:
            return []
        begun = time.monotonic()
        for process in self._running:
            try:
                process.wait(max(0.0, begun + seconds - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.close()
        told = "".join(log.read_text() for log in sorted(self._logs.glob("compiling-*.log")))
        failed = [line[:160] for line in told.splitlines() if "FAILED" in line or "Error:" in line]
        return [f"     kernels: waited {time.monotonic() - begun:.0f} s", *failed]

    def close(self) -> None:
        """End what still runs."""
        while self._running:
            end_session(self._running.pop())
