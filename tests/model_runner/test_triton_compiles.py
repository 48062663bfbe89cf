"""Every Triton kernel becomes a program for GPUs; compiling needs none."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROW = {"logits": "*fp32", "ids_in": "*i64", "ids_out": "*i64", "largest_out": "*fp32"}
ROW |= {"masks": "*i32", "ints": "*i64", "floats": "*fp64", "weights": "*fp32"}
ROW |= {"edits": "*i64", "biases": "*fp32", "rows": "*i64", "tops": "*i64", "values": "*fp32"}
ROW |= {"totals": "*fp64", "counts": "*i32"}
PAGES = {"source": "*i64", "target": "*i64", "source_pages": "*i64", "target_pages": "*i64"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compiles a kernel for a generation of GPUs; its own ptxas comes with triton."""
    pytest.importorskip("triton", reason="triton is for Linux alone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    def compile_for(
        kernel: Any,
        types: dict[str, str],
        constants: dict[str, int],
        capability: int,
        warps: int = 4,
    ) -> dict[str, Any]:
        names = {**types, **dict.fromkeys(constants, "constexpr")}
        signature = {name: names.get(name, "i32") for name in kernel.arg_names}
        source = compiler.ASTSource(kernel, signature, constants)
        target = GPUTarget("cuda", capability, 32)
        options = {"enable_fp_fusion": False, "num_warps": warps}
        program = compiler.compile(source, target, options=options)
        return dict(program.asm)

    return compile_for


def resources(program: dict[str, Any], folder: Path) -> str:
    """What ptxas says that a program takes."""
    from triton.backends.nvidia.compiler import get_ptxas

    source, target = folder / "kernel.ptx", re.search(r"\.target (\w+)", program["ptx"])
    assert target is not None
    source.write_text(program["ptx"])
    arch = int(target[1].removeprefix("sm_").rstrip("a"))
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", "-o", os.devnull, source]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name", ["_edit_rows", "_penalize_rows", "_sample_rows", "_score_rows", "_copy_pieces"]
)
def test_kernel_becomes_a_cubin(name: str, capability: int, compiled: Any, tmp_path: Path) -> None:
    """One with many warps has registers for all of them."""
    from kvrelay.mem_cache import convert_triton
    from kvrelay.model_runner.sampling import sampling_triton

    if name == "_copy_pieces":
        constants = {"block_words": convert_triton.BLOCK_WORDS}
        program = compiled(convert_triton._copy_pieces, PAGES, constants, capability)
    else:
        kernel = getattr(sampling_triton, name)
        if name in ("_sample_rows", "_score_rows"):
            options = {"block": sampling_triton.ROW_BLOCK}, capability, sampling_triton.ROW_WARPS
            program = compiled(kernel, ROW, *options)
            assert "0 bytes spill stores, 0 bytes spill loads" in resources(program, tmp_path)
        else:
            block = sampling_triton.ENTRIES if name == "_edit_rows" else sampling_triton.BLOCK
            program = compiled(kernel, ROW, {"block": block}, capability)
        # Fused, noise and penalties would not be those of the CPU.
        assert "fma.rn.f32" not in program["ptx"] or name == "_score_rows"
    assert program["cubin"][:4] == b"\x7fELF"
    assert f"sm_{capability}" in program["ptx"]
