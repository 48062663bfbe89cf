"""Which implementation of a layer's elementwise operations a model has."""

from __future__ import annotations

from typing import Any

import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.layers.batch_invariant import check_invariant
from kvrelay.model_runner.layers.elementwise import (
    CpuElementwise,
    Elementwise,
    TorchElementwise,
)
from kvrelay.model_runner.layers.flashinfer_elementwise import FlashInferElementwise
from kvrelay.model_runner.layers.invariant_elementwise import InvariantElementwise


def make_elementwise(
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    flashinfer: Any | None = None,
    threads: KernelThreads | None = None,
) -> Elementwise:
    """The fastest implementation; float32 stays in torch, where it equals transformers exactly.

    Args:
        dtype: the model's.
        device: the model's.
        batch_invariant: a row's result must not depend on the rows beside it. Then float32
            differs from transformers by its last bits.
        flashinfer: the package, if that is to be used: its kernels are for other dtypes.
        threads: of kernels of ours; None: as many as torch has now.

    Raises:
        UnsupportedOptionError: no kernels keep that promise; the message names --batch-invariant.
    """
    if batch_invariant:
        check_invariant("norms and activations", dtype, device)
        return InvariantElementwise(threads)
    if flashinfer is not None:
        return FlashInferElementwise(flashinfer)
    if device.type == "cpu" and dtype is torch.bfloat16:
        return CpuElementwise(threads)
    return TorchElementwise()
