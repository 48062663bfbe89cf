"""FlashInfer's kernels compile for sm_90a, load, and have what is called; no GPU is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.model_runner.attention.flashinfer_compiler import compiler_lacks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUBLAS_HEADER = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include", "cublasLt.h")
"""That the module of norms includes."""


def make_driver(folder: Path) -> None:
    """An empty libcuda in place of the driver's, to link with and to load."""
    compiler = shutil.which("c++")
    assert compiler is not None
    library = folder / "libcuda.so.1"
    source = folder / "empty.cpp"
    source.touch()
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([compiler, *options, str(source)], check=True)
    (folder / "libcuda.so").symlink_to(library)


@pytest.mark.parametrize(
    "kind", ["decode", "latent", "latent_fp8", "norm", "silu", "gelu", "rope", "page"]
)
def test_kernel_compiles_and_loads(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", exc_type=ImportError, reason="pip install 'kvrelay[cuda]'")
    if lack := compiler_lacks():
        pytest.skip(lack)
    if kind == "norm" and not CUBLAS_HEADER.exists():
        pytest.skip("this CUDA toolkit has no cublasLt.h")
    make_driver(tmp_path)
    paths = [str(tmp_path), "/usr/local/cuda/lib64", os.environ.get("LIBRARY_PATH", "")]
    variables = {
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": str(tmp_path),
        "MAX_JOBS": "1",
    }
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("flashinfer_build.py"), kind],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    library = Path(run.stdout.splitlines()[-1])
    assert b".nv_fatbin" in library.read_bytes()
    assert "code=sm_90a" in (library.parent / "build.ninja").read_text()
