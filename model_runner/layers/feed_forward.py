"""The second half of a layer, each token by itself: one gated product, or some of many experts."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.model_runner.config.model_config import Activation, MoEConfig
from kvrelay.model_runner.layers.expert_router import ExpertRouter
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


class Expert:
    """A small feed-forward for the tokens that are sent to it."""

    def __init__(self, loader: WeightLoader, prefix: str, inner: int) -> None:
        self._gate = GatedLinear(loader, prefix, inner)
        self._down = loader.linear(prefix, {"down_proj": loader.config.hidden_size}, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        return self._down(self._gate(x))


class MoEFeedForward:
    """A mixture of experts: each token goes to some, and to one that all tokens share.

    DeepSeekMoE (arXiv 2401.06066); the experts run one after the other.
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, prefix: str) -> None:
        self._adds_in_norms = loader.elementwise.adds_in_norms
        self._router = ExpertRouter(loader, experts, f"{prefix}.gate")
        self._experts = [
            Expert(loader, f"{prefix}.experts.{index}", experts.moe_intermediate_size)
            for index in range(experts.n_routed_experts)
        ]
        self._shared = Expert(loader, f"{prefix}.shared_experts", experts.shared_intermediate_size)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        chosen, weights = self._router(x)
        total = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, ranks = torch.where(chosen == index)
            result = self._experts[index](x[rows]) * weights[rows, ranks, None]
            total.index_add_(0, rows, result.to(x.dtype))
        addend = total + self._shared(x)
        return Hidden(residual, addend) if self._adds_in_norms else Hidden(residual + addend)


def make_feed_forward(
    loader: WeightLoader, experts: MoEConfig | None, prefix: str, norm: str
) -> FeedForward:
    """The feed-forward `prefix` of the checkpoint; `norm` is that of `WeightLoader.output`."""
    if experts is None:
        return DenseFeedForward(loader, prefix, norm)
    return MoEFeedForward(loader, experts, prefix)
