"""The second half of a layer, each token by itself: one gated product, or some of many experts."""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import torch

from kvrelay.model_runner.config.model_config import Activation, MoEConfig
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


class ExpertRouter:
    """DeepSeek's choice of experts, in float32.

    V2 (arXiv 2405.04434) chooses by the softmax; a group is as good as its best expert. V3 (arXiv
    2412.19437) chooses by sigmoids plus a bias. The bias balances the load, and is no part of the
    weights. A group is as good as its two best experts.
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, prefix: str) -> None:
        shape = (experts.n_routed_experts, loader.config.hidden_size)
        self._experts = experts
        self._elementwise = loader.elementwise
        weight = loader.checkpoint.take(f"{prefix}.weight", shape)
        self._linear = loader.linears.make(weight.to(torch.float32))
        self._score_correction_bias = None
        if experts.noaux_tc:
            name = f"{prefix}.e_score_correction_bias"
            self._score_correction_bias = loader.checkpoint.take(
                name, (experts.n_routed_experts,), torch.float32
            )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, hidden_size]`` to experts and weights, both ``[T, num_experts_per_tok]``."""
        logits = self._linear(x.to(torch.float32))
        if self._score_correction_bias is None:
            scores = preference = self._elementwise.softmax(logits)
        else:
            scores = self._elementwise.sigmoid(logits)
            preference = scores + self._score_correction_bias
        chosen = self._mask_other_groups(preference).topk(self._experts.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        if self._experts.norm_topk_prob:
            weights = weights / (self._elementwise.sum_rows(weights) + 1e-20)
        return chosen, weights * self._experts.routed_scaling_factor

    def _mask_other_groups(self, preference: torch.Tensor) -> torch.Tensor:
        """`preference` with -inf for experts of groups that the token does not go to."""
        experts = self._experts
        if experts.topk_group == experts.n_group:
            return preference
        grouped = preference.view(len(preference), experts.n_group, -1)
        best = reduce(torch.add, grouped.topk(2 if experts.noaux_tc else 1).values.unbind(-1))
        kept = best.topk(experts.topk_group).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)
