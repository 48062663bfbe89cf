"""Matrix products, with weights in the layout that is fastest on the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

import torch
from torch.nn import functional

from kvrelay.cpu_kernels.arrays import address
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES, LINE_BYTES
from kvrelay.cpu_kernels.processor import has_bfloat16_products, has_float_products
from kvrelay.cpu_kernels.products.product import PAIRS, PANEL, Unit, multiply
from kvrelay.cpu_kernels.products.product_float32 import multiply_float32
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, may_use_tiles
from kvrelay.mem_cache.pool import HUGE_PAGE, allocate_huge_pages
from kvrelay.model_runner.checkpoint.packed_weight import PackedWeight
from kvrelay.model_runner.layers.batch_invariant import check_invariant
from kvrelay.model_runner.layers.fp8_linear import (
    BlockScaledLinear,
    RowScaledLinear,
    fp8_products_lack,
)
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.layers.kernel_linear import KernelLinear
from kvrelay.model_runner.layers.nibble_linear import NibbleLinear
from kvrelay.model_runner.layers.product_choice import ProductChoice, ProductWay, describe_shape

BLOCK_BYTES: Final = 32 * HUGE_PAGE
"""The bytes taken from the system at a time; a part that is never used takes no memory."""


class WeightMemory:
    """Memory for weights, one behind the other, in huge pages where the system has them.

    With small pages a TLB miss comes every 4 KiB, and the processor's own prefetching ends there. A
    single layer's weights are too small to get huge pages by themselves. Memory is free again when
    all weights of a block are gone.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized CPU memory that begins at a cache line."""
        nbytes = math.prod(shape) * dtype.itemsize
        kept = -(-nbytes // LINE_BYTES) * LINE_BYTES
        if len(self._free) < kept:
            self._free = allocate_huge_pages(max(kept, BLOCK_BYTES))
        taken, self._free = self._free[:nbytes], self._free[kept:]
        return taken.view(dtype).view(shape)


logger = logging.getLogger(__name__)

SHARED_WEIGHTS: Final = 1 << 16
"""Fewer are one thread's work: to begin with others takes as long as to multiply."""


class Linear(Protocol):
    """``y = x W^T + b`` for ``x [T, in]`` and ``W [out, in]``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``; `x` is contiguous and has at least one row."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + y`` with ``residual [T, out]``."""
        ...


MakeLinear: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""Code that makes the product with a weight and a bias."""


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


class PanelLinear(KernelLinear):
    """bfloat16 on a CPU: weights in panels for our own kernel.

    For processors that multiply pairs or tiles of it. Others with AVX2 or AVX512 multiply float32:
    torch's products of bfloat16 are five to nine times slower there than its products of float32.

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
        outputs, self._inputs = weight.shape
        super().__init__(outputs)
        self._unit = find_unit(self._inputs)
        self._weight = _pack_panels(weight, memory)
        self._bias = None if bias is None else bias.contiguous()
        self._threads = _threads_for(weight, threads)

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether the kernel serves for this weight on this processor."""
        is_known = weight.device.type == "cpu" and weight.dtype is torch.bfloat16
        has_vectors = has_bfloat16_products() or has_float_products()
        return is_known and has_vectors and _fills_vectors(weight)

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


def _threads_for(weight: torch.Tensor, threads: KernelThreads | None) -> KernelThreads:
    """The threads that multiply with this weight; None: as many as torch has now."""
    few_weights = weight.numel() < SHARED_WEIGHTS
    return KernelThreads(1) if few_weights else threads or KernelThreads()


def _fills_vectors(weight: torch.Tensor) -> bool:
    """Whether kernels multiply with a weight of this shape."""
    outputs, inputs = weight.shape
    return inputs > 0 and inputs % PAIRS == 0 and outputs % LANES == 0


def find_unit(inputs: int) -> int:
    """The fastest `Unit` of this processor for so many inputs."""
    if not has_bfloat16_products():
        return int(Unit.FLOATS)
    in_tiles = inputs % TILE_NUMBERS == 0 and may_use_tiles()
    return int(Unit.TILES if in_tiles else Unit.PAIRS)


def _torch_multiplies_bfloat16() -> bool:
    """Whether oneDNN is in this torch and takes bfloat16, fast or slowly, on this processor."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def as_panels(weight: torch.Tensor) -> torch.Tensor:
    """``[out, in]`` as ``[panels, in / 2, PANEL, 2]``, in float32 ``[panels, in, PANEL]``.

    Outputs that the last panel lacks are 0. Numbers are not yet in the order of memory.
    """
    padded = _pad(weight, -len(weight) % PANEL, 0)
    if weight.dtype is torch.float32:
        return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2)
    return padded.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2)


def _pack_panels(weight: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
    """Copy a weight to `as_panels` in `memory`."""
    panels = as_panels(weight)
    return memory.take(panels.shape, weight.dtype).copy_(panels)


class FloatLinear(KernelLinear):
    """float32 on a CPU, of any processor: weights in panels for our own kernel.

    A row's result depends neither on the rows beside it nor on the number of threads.
    """

    dtype = torch.float32

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: WeightMemory,
        threads: KernelThreads | None = None,
    ) -> None:
        outputs, self._inputs = weight.shape
        super().__init__(outputs)
        self._weight = _pack_panels(weight, memory)
        self._bias = None if bias is None else bias.contiguous()
        self._threads = _threads_for(weight, threads)

    def _multiply(self, x: torch.Tensor, residual: int) -> torch.Tensor:
        rows, inputs = x.shape
        assert inputs == self._inputs
        out = x.new_empty(rows, self._outputs)
        multiply_float32(
            self._threads.count,
            address(x, torch.float32),
            self._weight.data_ptr(),
            0 if self._bias is None else address(self._bias, torch.float32),
            residual,
            out.data_ptr(),
            rows,
            self._inputs,
            self._outputs,
        )
        return out


class PaddedLinear:
    """A product of a shape that kernels do not have: zeros are multiplied beside it.

    Args:
        weight: ``[out, in]``
        bias: ``[out]``
        make: makes the product of the padded ones.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        make: MakeLinear,
    ) -> None:
        self._outputs, inputs = weight.shape
        self._more_outputs = _missing(self._outputs, LANES)
        self._more_inputs = _missing(inputs, PAIRS)
        bias = None if bias is None else functional.pad(bias, (0, self._more_outputs))
        self._linear = make(_pad(weight, self._more_outputs, self._more_inputs), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` to ``[T, out]``."""
        return self._without_zeros(self._linear(_pad(x, 0, self._more_inputs)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, out]`` plus the product."""
        residual, x = _pad(residual, 0, self._more_outputs), _pad(x, 0, self._more_inputs)
        return self._without_zeros(self._linear.add_to(residual, x))

    def _without_zeros(self, out: torch.Tensor) -> torch.Tensor:
        return out[:, : self._outputs].contiguous()


def _pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """With so many more rows and columns of zeros; itself if there are none."""
    return functional.pad(matrix, (0, columns, 0, rows)) if rows or columns else matrix


def _missing(count: int, multiple: int) -> int:
    """The difference of a `count` and the next multiple that is not 0."""
    return -count % multiple if count else multiple


class PackedLinear:
    """bfloat16 where oneDNN is faster than we are, or of a shape that no panels have.

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


class SeparateHeads:
    """A product for each head like `HeadwiseLinear`, by a `Linear` for each."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, heads, in]`` to ``[T, heads, out]``."""
        heads = enumerate(self._linears)
        return torch.stack([linear(x[:, head].contiguous()) for head, linear in heads], dim=1)


class LinearFactory:
    """The factory of one model's products, in the layout that is fastest on its device.

    Args:
        batch_invariant: a row's result must not depend on the rows beside it. All products are
            kernels of ours; what has none raises `UnsupportedOptionError` when it is made.
        threads: that kernels of ours have; None: as many as torch has now.
        cpu_kernels: what multiplies bfloat16 on a CPU: a `ProductWay`, or "auto", the faster one.
    """

    def __init__(
        self,
        batch_invariant: bool = False,
        threads: KernelThreads | None = None,
        cpu_kernels: str = "auto",
    ) -> None:
        self.batch_invariant = batch_invariant
        """Whether a row's result must not depend on the rows beside it."""
        self._threads = threads
        self._wanted = cpu_kernels
        self._choice = ProductChoice((threads or KernelThreads()).own)
        self._memory = WeightMemory()
        self._lacks: set[str] = set()
        self._weights = {True: 0, False: 0}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The product with ``weight [out, in]`` and ``bias [out]``."""
        if self.batch_invariant:
            check_invariant("a product", weight.dtype, weight.device)
            self._weights[True] += weight.numel()
            if _fills_vectors(weight):
                return self._make_own(weight, bias)
            return PaddedLinear(weight, bias, self._make_own)
        ways = self._find_ways(weight, self._memory)
        way = None
        if ways:
            outputs, inputs = weight.shape
            # What is only timed gives its memory back.
            way = self._choice.find((outputs, inputs), self._find_ways(weight, WeightMemory()))
        self._weights[way is ProductWay.OWN] += weight.numel()
        return PlainLinear(weight, bias) if way is None else ways[way](weight, bias)

    @property
    def prefers_own(self) -> bool:
        """Whether kernels of ours may multiply bfloat16 where there are such."""
        return self._wanted in ("auto", ProductWay.OWN, ProductWay.PACKED)

    def count(self, weights: int, own: bool) -> None:
        """Count `weights` of products that were made elsewhere, by kernels of ours or by others."""
        self._weights[own] += weights

    @property
    def ways(self) -> Mapping[str, str]:
        """The chosen `ProductWay` of each shape of weights, such as `960 x 576`."""
        return {describe_shape(shape): way for shape, way in self._choice.chosen.items()}

    @property
    def is_mostly_own(self) -> bool:
        """Whether kernels of ours compute most of the products that were made."""
        return self._weights[True] > self._weights[False]

    def _find_ways(
        self, weight: torch.Tensor, memory: WeightMemory
    ) -> Mapping[ProductWay, MakeLinear]:
        """The wanted ways to multiply with a `weight`, the likely fastest first; maybe none."""
        ways: dict[ProductWay, MakeLinear] = {}
        if PanelLinear.supports(weight):
            ways[ProductWay.OWN] = partial(PanelLinear, memory=memory, threads=self._threads)
        if PackedLinear.supports(weight):
            ways[ProductWay.ONEDNN] = PackedLinear
        wanted = ProductWay.OWN if self._wanted == ProductWay.PACKED else self._wanted
        return {way: make for way, make in ways.items() if wanted in ("auto", way)} or ways

    def takes_packed(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether products in `dtype` on this device may have weights in few bits."""
        return (
            device.type == "cpu" and dtype is torch.bfloat16 and self._wanted != ProductWay.ONEDNN
        )

    def make_packed(
        self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Linear:
        """The product with a `weight` in few bits, for inputs of `dtype`.

        It is dequantized where no kernel of ours has it, or is slower than others without.
        """
        if not NibbleLinear.supports(weight, dtype):
            return self.make(weight.dequantize(dtype), bias)
        outputs, inputs = weight.codes.shape
        if not (self.batch_invariant or self._wanted == ProductWay.PACKED):
            group = inputs // weight.scales.shape[1]
            way = self._choose_for(weight, (outputs, inputs, group))
            if way is not ProductWay.PACKED:
                return self.make(weight.dequantize(dtype), bias)
        self._weights[True] += weight.codes.numel()
        return self._make_nibbles(weight, bias, self._memory)

    def _choose_for(self, weight: PackedWeight, shape: tuple[int, int, int]) -> ProductWay:
        """The fastest way to multiply with a `weight` of this shape and group."""

        def pack(plain: torch.Tensor, _: None) -> Linear:
            """The product with any codes: their values do not matter for its time."""
            outputs, inputs = plain.shape
            groups = max(1, inputs // shape[2])
            codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
            scales, zeros = torch.ones(outputs, groups), codes[:, :groups]
            timed = PackedWeight(codes, scales, zeros, bits=weight.bits)
            return self._make_nibbles(timed, None, WeightMemory())

        plain = self._find_ways(weight.codes[:0].bfloat16(), WeightMemory())
        return self._choice.find(shape, {ProductWay.PACKED: pack, **plain})

    def _make_nibbles(
        self, weight: PackedWeight, bias: torch.Tensor | None, memory: WeightMemory
    ) -> Linear:
        return NibbleLinear(
            weight,
            bias,
            memory.take,
            _threads_for(weight.codes, self._threads),
            find_unit(weight.codes.shape[1]),
            exact=self.batch_invariant,
        )

    def make_fp8(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """The product with a `weight` in FP8, for inputs of `dtype`.

        Where the device has no such product, the weight is dequantized. On a GPU that takes twice
        the memory, and a line in the log says why, once.
        """
        lack = fp8_products_lack(weight, dtype)
        if lack is None:
            if self.batch_invariant:
                check_invariant("a product", weight.values.dtype, weight.values.device)
            kind = BlockScaledLinear if weight.blocks else RowScaledLinear
            return kind(weight, bias)
        if weight.values.device.type == "cuda" and lack not in self._lacks:
            self._lacks.add(lack)
            logger.warning("weights are dequantized, which takes twice their memory: %s", lack)
        return self.make(weight.dequantize(dtype), bias)

    def make_headwise(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product ``[T, heads, in]`` to ``[T, heads, out]``, ``weight [heads, in, out]``."""
        if self.batch_invariant:
            return SeparateHeads([self.make(head.t().contiguous()) for head in weight])
        return HeadwiseLinear(weight)

    def _make_own(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """By a kernel of ours: of a shape that it has, in bfloat16 or float32."""
        kind = FloatLinear if weight.dtype is torch.float32 else PanelLinear
        return kind(weight, bias, self._memory, self._threads)
