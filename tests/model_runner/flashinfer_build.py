"""Compiles one of FlashInfer's modules, and loads it: ``flashinfer_build.py decode``.

Run by `test_flashinfer_builds.py`, in a process of its own: the variables that choose the GPUs and
the folder are read when flashinfer is imported.
"""

from __future__ import annotations

import sys

import torch
from flashinfer.jit import attention

BF16 = torch.bfloat16
TYPES = (BF16, BF16, BF16, torch.int32)
KINDS = {
    # Heads of 128 dimensions, positions as they are, without a window or a soft cap.
    "decode": lambda: attention.gen_batch_decode_module(*TYPES, 128, 128, 0, False, False),
    "latent": lambda: attention.gen_batch_mla_module("fa2", *TYPES, 512, 64, False),
}

if __name__ == "__main__":
    spec = KINDS[sys.argv[1]]()
    spec.build(verbose=False)
    module = spec.load(spec.jit_library_path)
    assert callable(module.plan)
    assert callable(module.run)
    sys.stdout.write(f"{spec.jit_library_path}\n")
