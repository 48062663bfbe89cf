"""Weights in FP8 with their scales, before a product is made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.config.fp8_weights import BLOCK

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``values`` times their scales: a weight ``[out, in]``."""

    values: torch.Tensor
    """``[out, in]`` float8_e4m3fn"""
    scales: torch.Tensor
    """float32: ``[out, 1]``, or ``[ceil(out / BLOCK), ceil(in / BLOCK)]`` with `blocks`."""
    blocks: bool
    """Whether squares of `BLOCK` have scales; else outputs have."""
    input_scale: torch.Tensor | None = None
    """``[]`` float32: the scale that inputs are divided by; None: it is found with each input."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight ``[out, in]`` in `dtype`, each number rounded once."""
        weight = self.values.new_empty(self.values.shape, dtype=dtype)
        # Some rows at a time: all weights in float32 would take four times their memory.
        for start in range(0, len(weight), BLOCK):
            rows = slice(start, start + BLOCK)
            weight[rows] = self.values[rows].to(torch.float32) * self._scales_of(rows)
        return weight

    def _scales_of(self, rows: slice) -> torch.Tensor:
        """The scales of a block's rows: ``[rows, 1]`` or ``[in]``."""
        if not self.blocks:
            return self.scales[rows]
        return self.scales[rows.start // BLOCK].repeat_interleave(BLOCK)[: self.values.shape[1]]

    def keeps_scales(self, order: Int64Array) -> bool:
        """Whether output ``order[i]`` can become output ``i`` for all: each stays in its block."""
        return not self.blocks or np.array_equal(order // BLOCK, np.arange(len(order)) // BLOCK)

    def reorder(self, order: Int64Array) -> Fp8Weight:
        """Reorder outputs: output ``i`` of the result is ``order[i]``. `keeps_scales` must hold."""
        assert self.keeps_scales(order)
        rows = torch.from_numpy(order).to(self.values.device)
        # Not every device can index float8.
        values = self.values.view(torch.uint8)[rows].view(FP8)
        return replace(
            self, values=values, scales=self.scales if self.blocks else self.scales[rows]
        )
