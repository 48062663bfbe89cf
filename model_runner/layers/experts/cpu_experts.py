"""Experts by our own kernel, on a CPU: all products of a layer in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch.nn import functional

from kvrelay.cpu_kernels.arrays import as_array
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.processor import has_bfloat16_products, has_float_products
from kvrelay.cpu_kernels.products.expert_products import Gate, compute_experts
from kvrelay.cpu_kernels.products.product import Unit
from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import ClampedSilu
from kvrelay.model_runner.layers.experts.expert_weights import (
    ExpertActivation,
    ExpertWeights,
    pad_sizes,
)
from kvrelay.model_runner.layers.linear import (
    SHARED_WEIGHTS,
    WeightMemory,
    as_panels,
    find_unit,
)

_GATES: Final = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU}


class ExpertScratch:
    """The memory between the products of one layer at a time; it grows to the largest step's."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[numbers]`` of `dtype`, uninitialized, until the next call."""
        nbytes = numbers * dtype.itemsize
        if len(self._memory) < nbytes:
            # Before there is a larger one.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype)


class CpuExperts:
    """The `RoutedExperts` of a layer in bfloat16 or float32, with weights in panels.

    A row's result depends neither on the rows beside it nor on the number of threads.

    Args:
        weights: those of each expert, in the model's dtype.
        count: the number of experts.
        activation: the function of their gates.
        memory: where weights are put.
        scratch: shared by the layers of a model.
        threads: the threads that compute.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        count: int,
        activation: ExpertActivation,
        memory: WeightMemory,
        scratch: ExpertScratch,
        threads: KernelThreads,
    ) -> None:
        rooms: list[torch.Tensor | None] = []
        for index, one in enumerate(weights):
            gate_up, down, *biases = pad_sizes(one, LANES)
            parts = [as_panels(gate_up), as_panels(down), *biases]
            if index == 0:
                self._hidden, self._inner = down.shape
                rooms = [
                    None if part is None else memory.take((count, *part.shape), part.dtype)
                    for part in parts
                ]
            for room, part in zip(rooms, parts, strict=True):
                if room is not None and part is not None:
                    room[index] = part
        gate_up_panels, down_panels, *self._biases = rooms
        assert gate_up_panels is not None
        assert down_panels is not None
        self._gate_up, self._down = gate_up_panels, down_panels
        self._count = count
        self._units = [
            int(Unit.FLOATS if self._down.dtype is torch.float32 else find_unit(inputs))
            for inputs in (self._hidden, self._inner)
        ]
        if isinstance(activation, ClampedSilu):
            self._gate = int(Gate.CLAMPED_SILU)
            self._clamp = activation.slope, activation.most
        else:
            self._gate, self._clamp = int(_GATES[activation]), (0.0, 0.0)
        self._scratch = scratch
        self._threads = threads

    @property
    def num_weights(self) -> int:
        """The number of all experts' weights."""
        return self._gate_up.numel() + self._down.numel()

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether our kernel is made for this device and dtype, and faster than torch there."""
        if device.type != "cpu":
            return False
        if dtype is torch.bfloat16:
            return has_bfloat16_products() or has_float_products()
        return dtype is torch.float32 and has_float_products()

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        hidden, pairs = x.shape[1], chosen.numel()
        assert x.dtype is self._down.dtype
        assert shares.dtype is torch.float32
        if hidden != self._hidden:
            x = functional.pad(x, (0, self._hidden - hidden))
        used = min(pairs, self._count) * 3 * self._hidden * self._inner
        scratch = self._scratch.take(pairs * (self._hidden + 3 * self._inner), x.dtype)
        biases = [0 if bias is None else bias.data_ptr() for bias in self._biases]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        compute_experts(
            self._threads.count if used >= SHARED_WEIGHTS else 1,
            as_array(x.contiguous()),
            as_array(chosen.contiguous()),
            as_array(shares.contiguous()),
            self._count,
            self._gate_up.data_ptr(),
            biases[0],
            self._units[0],
            self._down.data_ptr(),
            biases[1],
            self._units[1],
            self._gate,
            *self._clamp,
            as_array(scratch),
            as_array(out),
        )
        return out if hidden == self._hidden else out[:, :hidden].contiguous()
