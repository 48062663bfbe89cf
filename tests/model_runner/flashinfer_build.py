"""Compiles one of FlashInfer's modules, and loads it: ``flashinfer_build.py decode``.

Run by `test_flashinfer_builds.py`, in a process of its own: the variables that choose the GPUs and
the folder are read when flashinfer is imported.
"""

from __future__ import annotations

import sys

import torch
from flashinfer.jit import activation, attention
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.page import gen_page_module
from flashinfer.jit.rope import gen_rope_module

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TYPES = (BF16, BF16, BF16, torch.int32)
ATTENTION = ("plan", "run")
KINDS = {
    # Heads of 128 dimensions, positions as they are, without a window or a soft cap.
    "decode": (
        lambda: attention.gen_batch_decode_module(*TYPES, 128, 128, 0, False, False),
        ATTENTION,
    ),
    "latent": (lambda: attention.gen_batch_mla_module("fa2", *TYPES, 512, 64, False), ATTENTION),
    "latent_fp8": (
        lambda: attention.gen_batch_mla_module("fa2", BF16, FP8, BF16, torch.int32, 512, 64, False),
        ATTENTION,
    ),
    "norm": (
        gen_norm_module,
        ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm"),
    ),
    "silu": (lambda: activation.gen_act_and_mul_module("silu"), ("silu_and_mul",)),
    "gelu": (lambda: activation.gen_act_and_mul_module("gelu_tanh"), ("gelu_tanh_and_mul",)),
    "rope": (gen_rope_module, ("apply_rope_pos_ids_cos_sin_cache",)),
    "page": (gen_page_module, ("append_paged_kv_cache", "append_paged_mla_kv_cache")),
}
"""What makes each module, and the functions of it that are called."""

if __name__ == "__main__":
    make, functions = KINDS[sys.argv[1]]
    spec = make()
    spec.build(verbose=False)
    module = spec.load(spec.jit_library_path)
    for name in functions:
        assert callable(getattr(module, name))
    sys.stdout.write(f"{spec.jit_library_path}\n")
