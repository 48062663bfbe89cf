"""Experts by products of their own, one expert after the other: the host chooses which run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights, add_choices
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight
from kvrelay.model_runner.layers.linear import Linear, LinearFactory


def count_rows(chosen: torch.Tensor, experts: int) -> list[int]:
    """Count the pairs of each expert; waits for the device."""
    counts: list[int] = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    return counts


class SlicedExperts:
    """The `RoutedExperts` of a layer, of any dtype and in FP8: a `Linear` for each product.

    Rows of an expert lie together; those of experts that nobody chose are not touched.

    Args:
        weights: those of each expert.
        dtype: the model's.
        linears: makes the products.
        activate: see `make_activation`.
    """

    def __init__(
        self,
        weights: Iterable[ExpertWeights],
        dtype: torch.dtype,
        linears: LinearFactory,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        def make(weight: torch.Tensor | Fp8Weight, bias: torch.Tensor | None) -> Linear:
            if isinstance(weight, Fp8Weight):
                return linears.make_fp8(weight, bias, dtype)
            return linears.make(weight, bias)

        self.products = [
            (make(one.gate_up, one.gate_up_bias), make(one.down, one.down_bias)) for one in weights
        ]
        """The two products of each expert."""
        self._activate = activate

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // chosen.shape[1]]
        results, begin = torch.empty_like(rows), 0
        for index, count in enumerate(count_rows(chosen, len(self.products))):
            if count:
                gate_up, down = self.products[index]
                some = slice(begin, begin + count)
                results[some] = down(self._activate(gate_up(rows[some])))
                begin += count
        return add_choices(results, order, shares)
