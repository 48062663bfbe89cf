"""The memory of tensors, as compiled kernels take it: an address, or a numpy array."""

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


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Where a kernel finds the elements of a CPU tensor, which must live until it has returned.

    It counts on from there and knows no dtype: nothing else would notice a wrong tensor.
    """
    assert tensor.dtype is dtype, f"{tensor.dtype} for {dtype}"
    assert tensor.is_contiguous(), "not contiguous"
    return tensor.data_ptr()
