"""The second half of a layer, each token by itself: one gated product, or some of many experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvrelay.model_runner.config.model_config import (
    DEEPSEEK_NAMES,
    Activation,
    ClampedSwiGLU,
    ExpertTensors,
    MoEConfig,
)
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
        self,
        loader: WeightLoader,
        prefix: str,
        inner: int,
        has_bias: bool = False,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> None:
        silu = loader.config.activation is Activation.SILU
        self._activate = loader.elementwise.silu_mul if silu else loader.elementwise.gelu_mul
        parts = dict.fromkeys(names, inner)
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

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        inner: int,
        names: ExpertTensors = DEEPSEEK_NAMES,
    ) -> None:
        self._gate = GatedLinear(loader, prefix, inner, names=(names.gate, names.up))
        self._down = loader.linear(prefix, {names.down: loader.config.hidden_size}, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        return self._down(self._gate(x))


class ClampedExpert:
    """An expert of gpt-oss: products with biases, and `ClampedSwiGLU` between them."""

    def __init__(
        self,
        loader: WeightLoader,
        clamped: ClampedSwiGLU,
        gate_up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._clamped = clamped
        self._elementwise = loader.elementwise
        self._gate_up = loader.linears.make(*gate_up)
        self._down = loader.linears.make(*down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        gate_up, clamped = self._gate_up(x), self._clamped
        inner = self._elementwise.clamped_silu_mul(gate_up, clamped.alpha, clamped.limit)
        return self._down(inner)


def load_experts(
    loader: WeightLoader, experts: MoEConfig, prefix: str
) -> Sequence[Expert | ClampedExpert]:
    """Load the routed experts, each of which takes and returns ``[T, hidden_size]``."""
    if experts.tensors.stacked:
        return _load_stacked(loader, experts, prefix)
    return [
        Expert(loader, f"{prefix}.{index}", experts.moe_intermediate_size, experts.tensors)
        for index in range(experts.n_routed_experts)
    ]


def _load_stacked(loader: WeightLoader, experts: MoEConfig, prefix: str) -> Sequence[ClampedExpert]:
    """Load experts that are one tensor, in which a gate's output is followed by its factor's."""
    assert experts.clamped is not None
    count, inner = experts.n_routed_experts, experts.moe_intermediate_size
    hidden, take = loader.config.hidden_size, loader.checkpoint.take
    gate_up = take(f"{prefix}.gate_up_proj", (count, hidden, 2 * inner))
    gate_up_bias = take(f"{prefix}.gate_up_proj_bias", (count, 2 * inner))
    down = take(f"{prefix}.down_proj", (count, inner, hidden))
    down_bias = take(f"{prefix}.down_proj_bias", (count, hidden))
    halves = torch.cat((torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)))
    halves = halves.to(gate_up.device)
    return [
        ClampedExpert(
            loader,
            experts.clamped,
            (gate_up[index].T[halves], gate_up_bias[index][halves]),
            (down[index].T.contiguous(), down_bias[index]),
        )
        for index in range(count)
    ]


class MoEFeedForward:
    """A mixture of experts: each token goes to some, and to one that all tokens may share.

    DeepSeekMoE (arXiv 2401.06066); the experts run one after the other.
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, layer: str) -> None:
        block = f"{layer}.{experts.tensors.block}"
        self._adds_in_norms = loader.elementwise.adds_in_norms
        self._router = ExpertRouter(loader, experts, block)
        self._experts = load_experts(loader, experts, f"{block}.experts")
        shared = experts.shared_intermediate_size
        self._shared = Expert(loader, f"{block}.shared_experts", shared) if shared else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        chosen, weights = self._router(x)
        total = torch.zeros_like(x)
        for index in torch.unique(chosen).tolist():
            rows, ranks = torch.where(chosen == index)
            result = self._experts[index](x[rows]) * weights[rows, ranks, None]
            total.index_add_(0, rows, result.to(x.dtype))
        addend = total if self._shared is None else total + self._shared(x)
        return Hidden(residual, addend) if self._adds_in_norms else Hidden(residual + addend)


def make_feed_forward(
    loader: WeightLoader, experts: MoEConfig | None, layer: str, norm: str
) -> FeedForward:
    """The feed-forward of the checkpoint's `layer`; `norm` is that of `WeightLoader.output`."""
    if experts is None:
        return DenseFeedForward(loader, f"{layer}.mlp", norm)
    return MoEFeedForward(loader, experts, layer)
