"""The memory of tensors as numpy arrays, which is what compiled kernels take."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a CPU tensor, not copied: bfloat16 as its bits (uint16), float32 as itself."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
