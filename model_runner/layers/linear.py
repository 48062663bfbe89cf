"""Matrix products, with weights in the layout that is fastest on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from kvrelay.cpu_kernels.arrays import address
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES, has_bfloat16_products
from kvrelay.cpu_kernels.products.product import PAIRS, PANEL, Unit, multiply
from kvrelay.cpu_kernels.products.product_floats import has_float_products
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, may_use_tiles
from kvrelay.model_runner.layers.batch_invariant import (
    RowBounds,
    RowwiseProduct,
    find_row_bounds,
)
from kvrelay.model_runner.layers.fp8_linear import (
    BlockScaledLinear,
    RowScaledLinear,
    fp8_products_lack,
)
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.layers.weight_memory import WeightMemory

logger = logging.getLogger(__name__)

_SHARED_WEIGHTS = 1 << 16
"""Fewer are one thread's work: to begin with others takes as long as to multiply."""


class Linear(Protocol):
    """``y = x W^T + b`` for ``x [T, in]`` and ``W [out, in]``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``; `x` is contiguous and has at least one row."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + y`` with ``residual [T, out]``."""
        ...


class PlainLinear:
    """Any device, any dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        return residual + functional.linear(x, self._weight, self._bias)


class PanelLinear:
    """bfloat16 on a CPU: weights in panels for our own kernel.

    For processors that multiply pairs or tiles of it. Those with AVX2 and without AVX512 multiply
    float32: torch's products of bfloat16 are nine times slower there than its products of float32.

    It is faster than `PackedLinear` for steps of few rows, since weights come from memory while
    others are multiplied. For prompts it is about as fast: pairs are up to 10% slower with more
    than 2,000 inputs, tiles up to 20% on one thread. A row's result depends neither on the rows
    beside it nor on the number of threads. While the last weights are multiplied, those that
    `memory` gives next are asked for: make products in the order in which they run.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: WeightMemory,
        threads: KernelThreads | None = None,
    ) -> None:
        self._outputs, self._inputs = weight.shape
        self._unit = _find_unit(self._inputs)
        self._weight = _pack_panels(weight, memory)
        self._bias = None if bias is None else bias.contiguous()
        few_weights = weight.numel() < _SHARED_WEIGHTS
        self._threads = KernelThreads(1) if few_weights else threads or KernelThreads()

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernel serves."""
        is_known = device.type == "cpu" and dtype is torch.bfloat16
        return is_known and (has_bfloat16_products() or _beats_torch_by_floats())

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether the kernel serves for this weight."""
        outputs, inputs = weight.shape
        is_even = inputs > 0 and inputs % PAIRS == 0 and outputs % LANES == 0
        return is_even and PanelLinear.runs(weight.device, weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return self._multiply(x, 0)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        residual = residual.contiguous()
        assert residual.shape == (x.shape[0], self._outputs)
        return self._multiply(x, address(residual, torch.bfloat16))

    def _multiply(self, x: torch.Tensor, residual: int) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        out = x.new_empty(rows, self._outputs)
        multiply(
            self._threads.count,
            self._unit,
            address(x, torch.bfloat16),
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            residual,
            out.data_ptr(),
            rows,
            self._inputs,
            self._outputs,
        )
        return out


def _find_unit(inputs: int) -> int:
    """The fastest `Unit` of this processor for so many inputs."""
    if not has_bfloat16_products():
        return int(Unit.FLOATS)
    in_tiles = inputs % TILE_NUMBERS == 0 and may_use_tiles()
    return int(Unit.TILES if in_tiles else Unit.PAIRS)


def _beats_torch_by_floats() -> bool:
    """Whether the kernel multiplies float32 where torch has no fast product of bfloat16."""
    return has_float_products() and not _torch_multiplies_bfloat16()


def _torch_multiplies_bfloat16() -> bool:
    """Whether oneDNN is in this torch, and multiplies bfloat16 on this processor."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _pack_panels(weight: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
    """``[out, in]`` to ``[panels, in / 2, PANEL, 2]``; outputs that the last one lacks are 0."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    if outputs % PANEL:
        weight = functional.pad(weight, (0, 0, 0, panels * PANEL - outputs))
    pairs = weight.view(panels, PANEL, inputs // 2, 2).transpose(1, 2)
    return memory.take(pairs.shape, weight.dtype).copy_(pairs)


class PackedLinear:
    """bfloat16 where torch has a fast product and we have none, or of a shape that no panels have.

    Reordered once for oneDNN.

    About 1.5 times as fast as `PlainLinear` at decode's few rows, and free of
    its pathological case (one row, two threads).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        # The overloads themselves: resolving them costs as much as a small product.
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_sum = torch.ops.mkldnn._linear_pointwise.binary

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether oneDNN is in this torch and wants this weight."""
        return (
            weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and _torch_multiplies_bfloat16()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        product: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        total: torch.Tensor = self._product_sum(x, residual, self._weight, self._bias, "add")
        return total


class HeadwiseLinear:
    """A product for each head, ``[T, heads, in]`` to ``[T, heads, out]``."""

    def __init__(self, weight: torch.Tensor) -> None:
        """With ``weight [heads, in, out]``."""
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, heads, in]`` to ``[T, heads, out]``, not contiguous."""
        return (x.transpose(0, 1) @ self._weight).transpose(0, 1)


class InvariantLinear:
    """A `Linear` each of whose rows is the same, bit for bit, whatever rows are beside it."""

    def __init__(self, linear: Linear, of_product: RowBounds, of_sum: RowBounds) -> None:
        self._linear = linear
        self._of_product = of_product
        self._of_sum = of_sum

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return self._of_product.apply(self._linear, x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        return self._of_sum.apply(self._linear.add_to, residual, x)


class LinearFactory:
    """The factory of one model's products, in the layout that is fastest on its device.

    Args:
        batch_invariant: a row's result must not depend on the rows beside it. A product that
            does not keep to that raises `UnsupportedOptionError` when it is made.
        threads: that kernels of ours have; None: as many as torch has now.
    """

    def __init__(self, batch_invariant: bool = False, threads: KernelThreads | None = None) -> None:
        self._batch_invariant = batch_invariant
        self._threads = threads
        self._memory = WeightMemory()
        self._lacks: set[str] = set()
        # Layers repeat: one trial for each kind and shape of product.
        self._bounds: dict[tuple[object, ...], RowBounds] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The product with ``weight [out, in]`` and ``bias [out]``."""
        if PanelLinear.supports(weight):
            return PanelLinear(weight, bias, self._memory, self._threads)
        packed = PackedLinear.supports(weight)
        linear = PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)
        if not self._batch_invariant:
            return linear
        outputs, inputs = weight.shape
        x, residual = weight.new_empty(1, inputs), weight.new_empty(1, outputs)
        kind = (packed, bias is None)
        return InvariantLinear(
            linear,
            self._bounds_of("product", kind, linear, x),
            self._bounds_of("sum", kind, linear.add_to, residual, x),
        )

    def make_fp8(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """The product with a `weight` in FP8, for inputs of `dtype`.

        Where the device has no such product, the weight is dequantized. On a GPU that takes twice
        the memory, and a line in the log says why, once.
        """
        lack = fp8_products_lack(weight, dtype)
        if lack is None:
            kind = BlockScaledLinear if weight.blocks else RowScaledLinear
            return kind(weight, bias)
        if weight.values.device.type == "cuda" and lack not in self._lacks:
            self._lacks.add(lack)
            logger.warning("weights are dequantized, which takes twice their memory: %s", lack)
        return self.make(weight.dequantize(dtype), bias)

    def make_headwise(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product ``[T, heads, in]`` to ``[T, heads, out]``, ``weight [heads, in, out]``."""
        linear = HeadwiseLinear(weight)
        if not self._batch_invariant:
            return linear
        heads, inputs, _ = weight.shape
        x = weight.new_empty(1, heads, inputs)
        bounds = self._bounds_of("headwise", weight.shape, linear, x)
        return partial(bounds.apply, linear)

    def _bounds_of(
        self, method: str, kind: object, product: RowwiseProduct, *example: torch.Tensor
    ) -> RowBounds:
        key = (method, kind, *((one.shape, one.dtype) for one in example))
        if key not in self._bounds:
            self._bounds[key] = find_row_bounds(product, *example)
        return self._bounds[key]
