"""Products on a CPU with weights that stay in 4 bits or fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvrelay.cpu_kernels.arrays import address
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.processor import has_bfloat16_products, has_float_products
from kvrelay.cpu_kernels.products.product import PANEL, Unit
from kvrelay.cpu_kernels.products.product_nibbles import FEW_ROWS, WORD, multiply_nibbles
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, TILE_ROWS
from kvrelay.model_runner.checkpoint.packed_weight import PackedWeight
from kvrelay.model_runner.layers.kernel_linear import KernelLinear

_BITS = 4
TakeMemory = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Code that returns uninitialized memory which begins at a cache line."""


class NibbleLinear(KernelLinear):
    """bfloat16 inputs on a CPU, and integers of at most 4 bits in panels for our own kernel.

    Args:
        weight: what it is made of, which `supports` must allow.
        bias: ``[out]``
        take: gives the memory of the panels.
        threads: the threads that multiply.
        unit: the fastest `Unit` for so many inputs.
        exact: results are those of the same weights in bfloat16, to the bit, whatever the batch.
            Otherwise few rows are faster, and no weight of theirs is rounded.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        take: TakeMemory,
        threads: KernelThreads,
        unit: int,
        exact: bool = False,
    ) -> None:
        assert weight.zeros is not None
        outputs, self._inputs = weight.codes.shape
        super().__init__(outputs)
        self._groups = weight.scales.shape[1]
        words = _as_words(weight.codes)
        self._codes = _copy_panels(words, torch.int32, take)
        self._scales = _copy_panels(weight.scales, torch.float32, take)
        self._zeros = _copy_panels(weight.zeros, torch.uint8, take)
        self._bias = None if bias is None else bias.contiguous()
        self._threads = threads
        self._unit = unit
        in_tiles = unit == Unit.TILES and self._inputs // self._groups % TILE_NUMBERS == 0
        self._unit_of_few = int(Unit.TILES if in_tiles else Unit.PAIRS)
        self._few_rows = TILE_ROWS if in_tiles else FEW_ROWS
        if exact or unit == Unit.FLOATS:
            self._few_rows = 0

    @staticmethod
    def supports(weight: PackedWeight, dtype: torch.dtype) -> bool:
        """Whether the kernel serves for this weight, with inputs of `dtype`, on this processor."""
        if weight.codes.device.type != "cpu" or dtype is not torch.bfloat16:
            return False
        if weight.bits > _BITS or weight.zeros is None or weight.groups is not None:
            return False
        outputs, inputs = weight.codes.shape
        groups = weight.scales.shape[1]
        fills = outputs % LANES == 0 and inputs % (groups * WORD) == 0
        has_vectors = has_bfloat16_products() or has_float_products()
        return fills and has_vectors and _are_short(weight.scales)

    def _multiply(self, x: torch.Tensor, residual: int) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        out = x.new_empty(rows, self._outputs)
        by_codes = rows <= self._few_rows
        multiply_nibbles(
            self._threads.count,
            self._unit_of_few if by_codes else self._unit,
            by_codes,
            address(x, torch.bfloat16),
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            self._zeros.data_ptr(),
            self._groups,
            0 if self._bias is None else self._bias.data_ptr(),
            residual,
            out.data_ptr(),
            rows,
            self._inputs,
            self._outputs,
        )
        return out


def _are_short(scales: torch.Tensor) -> bool:
    """Whether scales have at most 11 bits, so that their products with codes are exact."""
    rounded = (scales.to(dtype).float() for dtype in (torch.float16, torch.bfloat16))
    return bool(scales.isfinite().all()) and any(torch.equal(one, scales) for one in rounded)


def _as_words(codes: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` to words ``[out, in / 8]``: second inputs of pairs are in upper halves."""
    outputs, inputs = codes.shape
    pairs = codes.view(outputs, inputs // WORD, WORD // 2, 2)
    words = torch.zeros(outputs, inputs // WORD, dtype=torch.int32)
    for pair in range(WORD // 2):
        for half in (0, 1):
            words |= pairs[:, :, pair, half].int() << (_BITS * pair + 16 * half)
    return words


def _copy_panels(columns: torch.Tensor, dtype: torch.dtype, take: TakeMemory) -> torch.Tensor:
    """``[out, n]`` as ``[panels, n, PANEL]``; outputs that the last panel lacks are 0."""
    outputs, count = columns.shape
    panels = -(-outputs // PANEL)
    memory = take((panels, count, PANEL), dtype)
    if outputs % PANEL:
        memory[-1] = 0
    for panel in range(panels):
        rows = columns[panel * PANEL : (panel + 1) * PANEL]
        memory[panel, :, : len(rows)] = rows.t()
    return memory
