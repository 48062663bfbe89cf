"""The memory of tensors, as compiled kernels take it: an address, or a numpy array."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""The integers that stand for other dtypes: kernels tell the two by the sign."""


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a CPU tensor, not copied.

    It has bfloat16 as its bits (uint16), float16 as its bits (int16), float32 as itself.
    """
    bits = _BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """The address of a CPU tensor's elements; the tensor must live until the kernel has returned.

    A kernel reads from there on without knowing a dtype: no other check would notice a wrong
    tensor.
    """
    assert tensor.dtype is dtype, f"{tensor.dtype} for {dtype}"
    assert tensor.is_contiguous(), "not contiguous"
    return tensor.data_ptr()
