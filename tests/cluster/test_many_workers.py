"""Twenty workers on one machine: all of a cluster but models and transfers.

In a process of its own, because Ray there has a place for each of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.slow]
WORKERS = 20


def test_they_start_together_serve_and_are_scaled_and_drained(tiny: Path):
    words = ["--model", str(tiny), "--workers", str(WORKERS), "--seconds", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_workers", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["workers"] == WORKERS
    assert found["listed"] == {"ready": WORKERS, "live": WORKERS}
    assert found["failed"] == found["processes_left"] == 0
    assert found["tokens_per_second"] > 0
