"""Sampling on a CUDA device: the cases of `sampler_cases.py`, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("sampler_cases.py")


def run_cases(interpret: bool) -> None:
    pytest.importorskip("triton", reason="triton is for Linux alone")
    # Without conftest.py, which imports what takes seconds and is not needed.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider"]
    variables = {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, CASES],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_kernels_sample_as_the_cpu_does() -> None:
    """By Triton's interpreter."""
    run_cases(interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_samples_as_the_cpu_does() -> None:
    run_cases(interpret=False)
