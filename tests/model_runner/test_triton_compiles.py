"""Every Triton kernel becomes a program for GPUs; compiling needs none."""

from __future__ import annotations

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
        kernel: Any, types: dict[str, str], constants: dict[str, int], capability: int
    ) -> dict[str, Any]:
        names = {**types, **dict.fromkeys(constants, "constexpr")}
        signature = {name: names.get(name, "i32") for name in kernel.arg_names}
        source = compiler.ASTSource(kernel, signature, constants)
        target = GPUTarget("cuda", capability, 32)
        program = compiler.compile(source, target, options={"enable_fp_fusion": False})
        return dict(program.asm)

    return compile_for


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name", ["_edit_rows", "_penalize_rows", "_sample_rows", "_score_rows", "_copy_pieces"]
)
def test_kernel_becomes_a_cubin(name: str, capability: int, compiled: Any) -> None:
    from kvrelay.mem_cache import convert_triton
    from kvrelay.model_runner.sampling import sampling_triton

    if name == "_copy_pieces":
        constants = {"block_words": convert_triton.BLOCK_WORDS}
        program = compiled(convert_triton._copy_pieces, PAGES, constants, capability)
    else:
        block = sampling_triton.ENTRIES if name == "_edit_rows" else sampling_triton.BLOCK
        kernel = getattr(sampling_triton, name)
        program = compiled(kernel, ROW, {"block": block}, capability)
        # Fused, noise and penalties would not be those of the CPU.
        assert "fma.rn.f32" not in program["ptx"] or name == "_score_rows"
    assert program["cubin"][:4] == b"\x7fELF"
    assert f"sm_{capability}" in program["ptx"]
