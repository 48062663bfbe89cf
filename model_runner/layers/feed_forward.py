"""The second half of a layer, each token by itself: one gated product, or some of many experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from kvrelay.model_runner.config.model_config import Activation, MoEConfig
from kvrelay.model_runner.layers.expert_router import ExpertRouter
from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights
from kvrelay.model_runner.layers.hidden import Hidden
from kvrelay.model_runner.layers.loader import WeightLoader


class FeedForward(Protocol):
    """The second half of a layer, after its attention."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        ...


class GatedLinear:
    """``activation(gate(x)) * up(x)``: Shazeer (arXiv 2002.05202)."""

    def __init__(
        self, loader: WeightLoader, prefix: str, inner: int, has_bias: bool = False
    ) -> None:
        silu = loader.config.activation is Activation.SILU
        self._activate = loader.elementwise.silu_mul if silu else loader.elementwise.gelu_mul
        parts = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = loader.linear(prefix, parts, loader.config.hidden_size, has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, inner]``."""
        return self._activate(self._gate_up(x))


class DenseFeedForward:
    """``down(activation(gate(x)) * up(x))``, the same for every token."""

    def __init__(self, loader: WeightLoader, prefix: str, norm: str) -> None:
        inner, has_bias = loader.config.intermediate_size, loader.config.mlp_bias
        self._gate = GatedLinear(loader, prefix, inner, has_bias)
        self._down = loader.output(prefix, "down_proj", inner, has_bias, norm)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        return self._down.add_to(residual, self._gate(x))


class SharedExpert:
    """A small feed-forward beside the routed experts, which every token goes to."""

    def __init__(self, loader: WeightLoader, prefix: str, inner: int) -> None:
        self._gate = GatedLinear(loader, prefix, inner)
        self._down = loader.linear(prefix, {"down_proj": loader.config.hidden_size}, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        return self._down(self._gate(x))


class MoEFeedForward:
    """A mixture of experts: each token goes to some, and to one that all tokens share.

    DeepSeekMoE (arXiv 2401.06066).
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, prefix: str) -> None:
        self._adds_in_norms = loader.elementwise.adds_in_norms
        self._router = ExpertRouter(loader, experts, f"{prefix}.gate")
        self._experts = loader.experts.make(
            _read_experts(loader, experts, f"{prefix}.experts"),
            experts.n_routed_experts,
            loader.config.activation,
        )
        inner = experts.shared_intermediate_size
        self._shared = SharedExpert(loader, f"{prefix}.shared_experts", inner)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        addend = self._experts(x, *self._router(x)) + self._shared(x)
        return Hidden(residual, addend) if self._adds_in_norms else Hidden(residual + addend)


def _read_experts(loader: WeightLoader, experts: MoEConfig, prefix: str) -> Iterator[ExpertWeights]:
    """Read the weights of routed experts, each when it is asked for."""
    hidden, inner = loader.config.hidden_size, experts.moe_intermediate_size
    halves = {"gate_proj": inner, "up_proj": inner}
    for index in range(experts.n_routed_experts):
        name = f"{prefix}.{index}"
        yield ExpertWeights(
            loader.stacked_weight(name, halves, hidden),
            loader.stacked_weight(name, {"down_proj": hidden}, inner),
        )


def make_feed_forward(
    loader: WeightLoader, experts: MoEConfig | None, prefix: str, norm: str
) -> FeedForward:
    """The feed-forward `prefix` of the checkpoint; `norm` is that of `WeightLoader.output`."""
    if experts is None:
        return DenseFeedForward(loader, prefix, norm)
    return MoEFeedForward(loader, experts, prefix)
