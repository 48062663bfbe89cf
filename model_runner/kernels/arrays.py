"""The memory of tensors as numpy arrays, which is what compiled kernels take."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Which integers stand for what: kernels tell the two by the sign."""


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a CPU tensor, not copied.

    bfloat16 as its bits (uint16), float16 as its bits (int16), float32 as itself.
    """
    bits = _BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()
