"""Sampling on a CUDA device, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_sample_as_the_cpu_does() -> None:
    """By Triton's interpreter: the cases of `interpreted_sampler.py`."""
    pytest.importorskip("triton", reason="triton is for Linux alone")
    cases = Path(__file__).with_name("interpreted_sampler.py")
    # Without conftest.py, which imports what takes seconds and is not needed.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
