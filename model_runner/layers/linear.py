"""Matrix products, with weights in the layout that is fastest on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from kvrelay.model_runner.layers.batch_invariant import (
    RowBounds,
    RowwiseProduct,
    find_row_bounds,
)


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


class PackedLinear:
    """bfloat16 on a CPU: weights reordered once for oneDNN.

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
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
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
    """Makes the products of one model, in the layout that is fastest on its device.

    Args:
        batch_invariant: a row's result must not depend on the rows beside it. A product that
            does not keep to that raises `UnsupportedOptionError` when it is made.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        # Layers repeat: one trial for each kind and shape of product.
        self._bounds: dict[tuple[object, ...], RowBounds] = {}

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """The product with ``weight [out, in]`` and ``bias [out]``."""
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
