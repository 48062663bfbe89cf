"""The features of this processor: the one place where kernels ask for them.

The environment variable `KVRELAY_HIDE_CPU_FEATURES` names features that kernels are to do without.
They are named as in LLVM, with commas between them. `avx512bf16,amx-bf16` makes a processor of
today one of 2019. It is for tests and measurements; oneDNN's own variable is `ONEDNN_MAX_CPU_ISA`.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import torch

_ORDERING: Final = {"avx2", "fma", "avx512f", "avx512dq", "avx512bf16", "amx-bf16", "f16c"}
"""The features by which kernels of ours differ."""
HIDE_FEATURES: Final = "KVRELAY_HIDE_CPU_FEATURES"


@cache
def cpu_features() -> frozenset[str]:
    """The features that kernels may use, as LLVM calls them.

    Raises:
        ValueError: a feature is to be hidden that LLVM does not know; the message names the
            variable.
    """
    known = dict(llvmlite.binding.get_host_cpu_features())
    hidden = [name for name in os.environ.get(HIDE_FEATURES, "").split(",") if name]
    for name in hidden:
        if name not in known:
            raise ValueError(f"{HIDE_FEATURES}: LLVM knows no feature {name!r} of this processor")
        known[name] = False
    if hidden:
        numba.config.CPU_FEATURES = ",".join(
            f"{'+' if is_there else '-'}{name}" for name, is_there in sorted(known.items())
        )
    return frozenset(name for name, is_there in known.items() if is_there)


@cache
def processor_name() -> str:
    """The processor's name and its microcode, as the system calls them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    parts = (line.partition(":") for line in lines)
    told = {name.strip(): value.strip() for name, _, value in parts}
    name = told.get("model name", platform.machine())
    return f"{name}, microcode {told['microcode']}" if "microcode" in told else name


def describe_processor() -> str:
    """Name the processor and the fastest that kernels use of it, as a benchmark's table does."""
    name = processor_name().partition(", microcode")[0]
    units = {"AMX": has_tiles(), "AVX512-BF16": has_bfloat16_products()}
    units |= {"AVX512": has_wide_registers(), "AVX2": has_float_products()}
    unit = next((unit for unit, is_there in units.items() if is_there), "no AVX2")
    hidden = f", without {os.environ[HIDE_FEATURES]}" if os.environ.get(HIDE_FEATURES) else ""
    return f"{name}, {unit}{hidden}"


def describe_arithmetic() -> str:
    """Name what the order of sums and the bits of functions follow from, here and in torch."""
    ours = sorted(_ORDERING & cpu_features())
    return "+".join([torch.backends.cpu.get_cpu_capability(), *ours])


def has_bfloat16_products() -> bool:
    """Whether this processor multiplies pairs of bfloat16: AVX512-BF16."""
    return "avx512bf16" in cpu_features()


def has_tiles() -> bool:
    """Whether this processor has tiles of bfloat16: AMX."""
    return "amx-bf16" in cpu_features()


def has_wide_registers() -> bool:
    """Whether this processor has 32 registers of 16 float32: AVX512. AVX2 has 16 of 8."""
    return "avx512f" in cpu_features()


def has_float_products() -> bool:
    """Whether this processor adds products of 8 float32 at a time: AVX2 with FMA."""
    return {"avx2", "fma"} <= cpu_features()


def has_float16() -> bool:
    """Whether this processor converts float16 by itself, as `widen` and `store` need."""
    return "f16c" in cpu_features() or platform.machine() in ("aarch64", "arm64")


cpu_features()  # before numba makes its compiler, which knows what is hidden
