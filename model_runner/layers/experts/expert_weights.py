"""The routed experts of a layer: their weights, their activation, and the sum of their results.

A pair is a token and an expert that it chose. Pairs are sorted by expert, so that the rows of each
lie together. A token's results are added in one order, so that no two runs differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch.nn import functional

from kvrelay.model_runner.config.model_config import Activation
from kvrelay.model_runner.config.moe_backend import ClampedSilu
from kvrelay.model_runner.layers.elementwise import Elementwise
from kvrelay.model_runner.layers.fp8_weight import Fp8Weight

ExpertActivation: TypeAlias = Activation | ClampedSilu


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one expert, in the model's dtype or in FP8."""

    gate_up: torch.Tensor | Fp8Weight
    """``[2 * inner, hidden]``, gates first"""
    down: torch.Tensor | Fp8Weight
    """``[hidden, inner]``"""
    gate_up_bias: torch.Tensor | None = None
    """``[2 * inner]``"""
    down_bias: torch.Tensor | None = None
    """``[hidden]``"""

    def dequantize(self, dtype: torch.dtype) -> ExpertWeights:
        """The same in `dtype`."""
        gate_up, down = (
            one.dequantize(dtype) if isinstance(one, Fp8Weight) else one
            for one in (self.gate_up, self.down)
        )
        return ExpertWeights(gate_up, down, self.gate_up_bias, self.down_bias)


class RoutedExperts(Protocol):
    """All routed experts of a layer."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute ``sum of shares[t, k] * expert(chosen[t, k])(x[t])`` over ``k``.

        Args:
            x: ``[T, hidden]``; ``T`` is at least 1.
            chosen: ``[T, each]`` int64: different experts for each token.
            shares: ``[T, each]`` float32.

        Returns:
            ``[T, hidden]``
        """
        ...


def make_activation(
    activation: ExpertActivation, elementwise: Elementwise
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from ``[T, 2 * N]``, gates first, to ``[T, N]``."""
    if isinstance(activation, ClampedSilu):
        return partial(clamped_silu_mul, clamp=activation)
    silu = activation is Activation.SILU
    return elementwise.silu_mul if silu else elementwise.gelu_mul


def clamped_silu_mul(gate_up: torch.Tensor, clamp: ClampedSilu) -> torch.Tensor:
    """``(up + 1) * gate * sigmoid(slope * gate)`` of ``[T, 2 * N]``, in float32, rounded once."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.most), up.clamp(-clamp.most, clamp.most)
    return ((up + 1) * gate * torch.sigmoid(clamp.slope * gate)).to(gate_up.dtype)


def add_choices(results: torch.Tensor, order: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Sum each token's results, by ``shares [T, each]``, in one order.

    Row ``i`` of ``results [T * each, hidden]`` is that of pair ``order[i]``.
    """
    tokens, each = shares.shape
    placed = torch.empty_like(results).index_copy_(0, order, results)
    total = (placed.view(tokens, each, -1) * shares[:, :, None]).sum(1)
    return total.to(results.dtype)


class ExpertStack:
    """The weights of all experts, one behind the other; one at a time comes from the checkpoint.

    Args:
        count: the number of experts.
        multiple: inner and hidden size are padded to multiples of it, with zeros, which changes
            no result: a padded inner number is 0 times something.
        up_first: rows of gates are behind the others.
    """

    def __init__(self, count: int, multiple: int = 1, up_first: bool = False) -> None:
        self._count = count
        self._multiple = multiple
        self._up_first = up_first
        self._next = 0
        self._parts: list[torch.Tensor | None] = []

    def add(self, weights: ExpertWeights) -> None:
        """Add those of the next expert, none of them in FP8."""
        parts = pad_sizes(weights, self._multiple, self._up_first)
        if not self._parts:
            self._parts = [
                None if part is None else part.new_empty(self._count, *part.shape) for part in parts
            ]
        for room, part in zip(self._parts, parts, strict=True):
            if room is not None and part is not None:
                room[self._next] = part
        self._next += 1

    @property
    def gate_up(self) -> torch.Tensor:
        """``[experts, 2 * inner, hidden]``"""
        return self._whole(0)

    @property
    def down(self) -> torch.Tensor:
        """``[experts, hidden, inner]``"""
        return self._whole(1)

    @property
    def gate_up_bias(self) -> torch.Tensor | None:
        """``[experts, 2 * inner]``"""
        return self._parts[2]

    @property
    def down_bias(self) -> torch.Tensor | None:
        """``[experts, hidden]``"""
        return self._parts[3]

    def _whole(self, part: int) -> torch.Tensor:
        assert self._next == self._count, "experts are missing"
        whole = self._parts[part]
        assert whole is not None
        return whole


PaddedParts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def pad_sizes(weights: ExpertWeights, multiple: int, up_first: bool = False) -> PaddedParts:
    """The weights of both products, and biases, with sizes as an `ExpertStack` has them."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    hidden, inner = down.shape
    more, wider = -inner % multiple, -hidden % multiple
    halves = _swap(gate_up.view(2, inner, hidden), up_first)
    gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
    if gate_up_bias is not None:
        gate_up_bias = _pad(_swap(gate_up_bias.view(2, inner), up_first), more).flatten()
    if down_bias is not None:
        down_bias = _pad(down_bias, wider)
    return (
        _pad(halves, wider, more).flatten(0, 1),
        _pad(down, more, wider),
        gate_up_bias,
        down_bias,
    )


def _swap(halves: torch.Tensor, swap: bool) -> torch.Tensor:
    return halves.flip(0) if swap else halves


def _pad(tensor: torch.Tensor, columns: int, rows: int = 0) -> torch.Tensor:
    """With so many more rows and columns of zeros."""
    if not (columns or rows):
        return tensor
    return functional.pad(tensor, (0, columns, 0, rows) if rows else (0, columns))
