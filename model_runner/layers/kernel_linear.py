"""The common part of products by kernels of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from kvrelay.cpu_kernels.arrays import address


class KernelLinear(ABC):
    """A `Linear` whose kernel adds to a residual that it is given by its address."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    """The type of inputs and outputs."""

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return self._multiply(x, 0)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        residual = residual.contiguous()
        assert residual.shape == (x.shape[0], self._outputs)
        return self._multiply(x, address(residual, self.dtype))

    @abstractmethod
    def _multiply(self, x: torch.Tensor, residual: int) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``, plus what is at the address `residual` unless it is 0."""
