"""Which implementation of a layer's elementwise operations a model has."""

from __future__ import annotations

from typing import Any

import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.model_runner.layers.elementwise import (
    CpuElementwise,
    Elementwise,
    InvariantElementwise,
    TorchElementwise,
)
from kvrelay.model_runner.layers.flashinfer_elementwise import FlashInferElementwise


def make_elementwise(
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    flashinfer: Any | None = None,
    threads: KernelThreads | None = None,
) -> Elementwise:
    """The fastest implementation; float32 stays in torch, where it equals transformers exactly.

    But for the last bit, if a row's result must not depend on the rows beside it. `flashinfer`
    is the package, if that is to be used: its kernels are for other dtypes than float32. `threads`
    are those of kernels of ours; None: as many as torch has now.
    """
    if flashinfer is not None:
        return FlashInferElementwise(flashinfer)
    if device.type == "cpu" and dtype is torch.bfloat16:
        return CpuElementwise(threads)
    return InvariantElementwise() if batch_invariant else TorchElementwise()
