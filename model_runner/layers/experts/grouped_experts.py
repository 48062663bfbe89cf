"""Experts by torch's grouped products: the host decides nothing, so graphs may have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.nn import functional

from kvrelay.model_runner.layers.experts.expert_weights import (
    ExpertStack,
    ExpertWeights,
    add_choices,
)

_ROW_BYTES: Final = 16
"""Rows of `grouped_mm` begin at multiples of it."""
_HOST_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_MAJOR_CAPABILITIES: Final = (9, 10)
"""The GPUs whose kernel reads on the device where groups end; for others torch waits."""


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups of `dtype` there."""
    if device.type == "cuda":
        return dtype is torch.bfloat16
    return device.type == "cpu" and dtype in _HOST_DTYPES


def grouped_products_wait(device: torch.device) -> bool:
    """Whether torch brings the ends of groups to the host there."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] not in _MAJOR_CAPABILITIES


class GroupedExperts:
    """The `RoutedExperts` of a layer, by two grouped products.

    Args:
        weights: those of each expert, in the model's dtype.
        count: the number of experts.
        dtype: the model's.
        activate: see `make_activation`.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        count: int,
        dtype: torch.dtype,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        stack = ExpertStack(count, _ROW_BYTES // dtype.itemsize)
        for one in weights:
            stack.add(one)
        self._gate_up = stack.gate_up.transpose(1, 2)
        self._down = stack.down.transpose(1, 2)
        self._gate_up_bias = stack.gate_up_bias
        self._down_bias = stack.down_bias
        self._ids = torch.arange(count, device=stack.down.device)
        self._activate = activate

    @property
    def num_weights(self) -> int:
        """The number of all experts' weights."""
        return self._gate_up.numel() + self._down.numel()

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._ids, right=True, out_int32=True)
        hidden, missing = x.shape[1], self._gate_up.shape[1] - x.shape[1]
        padded = functional.pad(x, (0, missing)) if missing else x
        rows = padded[order // chosen.shape[1]]
        inner = functional.grouped_mm(rows, self._gate_up, offs=ends)
        inner = self._activate(_add_bias(inner, self._gate_up_bias, experts))
        results = functional.grouped_mm(inner, self._down, offs=ends)
        results = _add_bias(results, self._down_bias, experts)
        return add_choices(results, order, shares)[:, :hidden].contiguous()


def _add_bias(rows: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
    """Add each row's expert's bias; a CUDA kernel has no place for it."""
    return rows if bias is None else rows + bias[experts]
