"""The second half of a layer, each token by itself: one gated product, or some of many experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.config.fp8_weights import Fp8Weights
from kvrelay.model_runner.config.model_config import Activation, ModelConfig, MoEConfig
from kvrelay.model_runner.layers.expert_router import ExpertRouter
from kvrelay.model_runner.layers.experts.expert_weights import ExpertWeights
from kvrelay.model_runner.layers.hidden import Hidden
from kvrelay.model_runner.layers.loader import Fp8Reader, WeightLoader


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


class SharedExpert:
    """A small feed-forward beside the routed experts, which every token goes to.

    Some weigh its result by a sigmoid of one product.
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, block: str) -> None:
        hidden, inner = loader.config.hidden_size, experts.shared_intermediate_size
        prefix, weigh = f"{block}.{experts.tensors.shared}", experts.tensors.shared_gate
        self._gate = GatedLinear(loader, prefix, inner)
        self._down = loader.linear(prefix, {"down_proj": hidden}, inner)
        self._elementwise = loader.elementwise
        self._weigh = None
        if weigh is not None:
            weight = loader.checkpoint.take(f"{block}.{weigh}.weight", (1, hidden), torch.float32)
            self._weigh = loader.linears.make(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden_size]`` to ``[T, hidden_size]``."""
        made = self._down(self._gate(x))
        if self._weigh is None:
            return made
        return made * self._elementwise.sigmoid(self._weigh(x.to(torch.float32))).to(made.dtype)


class MoEFeedForward:
    """A mixture of experts: each token goes to some, and to one that all tokens may share.

    DeepSeekMoE (arXiv 2401.06066).
    """

    def __init__(self, loader: WeightLoader, experts: MoEConfig, layer: str) -> None:
        block = f"{layer}.{experts.tensors.block}"
        self._adds_in_norms = loader.elementwise.adds_in_norms
        self._router = ExpertRouter(loader, experts, block)
        read = _read_stacked if experts.tensors.stacked else _read_each
        self._experts = loader.experts.make(
            read(loader, experts, f"{block}.experts"),
            experts.n_routed_experts,
            experts.clamped or loader.config.activation,
        )
        self._shared = None
        if experts.shared_intermediate_size:
            self._shared = SharedExpert(loader, experts, block)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual`` and the feed-forward of `x`, all ``[T, hidden_size]``."""
        addend = self._experts(x, *self._router(x))
        if self._shared is not None:
            addend = addend + self._shared(x)
        return Hidden(residual, addend) if self._adds_in_norms else Hidden(residual + addend)


def _read_each(loader: WeightLoader, experts: MoEConfig, prefix: str) -> Iterator[ExpertWeights]:
    """Read the weights of routed experts, each when it is asked for."""
    hidden, inner, names = loader.config.hidden_size, experts.moe_intermediate_size, experts.tensors
    halves = {names.gate: inner, names.up: inner}
    for index in range(experts.n_routed_experts):
        name = f"{prefix}.{index}"
        yield ExpertWeights(
            loader.stacked_weight(name, halves, hidden),
            loader.stacked_weight(name, {names.down: hidden}, inner),
        )


def expert_schemes(config: ModelConfig, checkpoint: Checkpoint) -> tuple[Fp8Weights | None, ...]:
    """The different schemes in FP8 that routed experts have; None among them: some are not in FP8.

    As in `ExpertFactory`, a layer's first expert speaks for all.
    """
    reader = Fp8Reader(checkpoint)
    schemes = (
        None
        if layer.moe.tensors.stacked
        else reader.scheme(f"model.layers.{index}.{layer.moe.tensors.block}.experts.0.{name}")
        for index, layer in enumerate(config.layers)
        if layer.moe is not None
        for name in (layer.moe.tensors.gate, layer.moe.tensors.up, layer.moe.tensors.down)
    )
    return tuple(dict.fromkeys(schemes))


def _read_stacked(loader: WeightLoader, experts: MoEConfig, prefix: str) -> Iterator[ExpertWeights]:
    """Read experts that are one tensor, inputs before outputs; gates and factors alternate."""
    count, inner = experts.n_routed_experts, experts.moe_intermediate_size
    hidden, take = loader.config.hidden_size, loader.checkpoint.take
    gate_up = take(f"{prefix}.gate_up_proj", (count, hidden, 2 * inner))
    gate_up_bias = take(f"{prefix}.gate_up_proj_bias", (count, 2 * inner))
    down = take(f"{prefix}.down_proj", (count, inner, hidden))
    down_bias = take(f"{prefix}.down_proj_bias", (count, hidden))
    for index in range(count):
        yield ExpertWeights(
            torch.cat((gate_up[index, :, ::2].T, gate_up[index, :, 1::2].T)),
            down[index].T.contiguous(),
            torch.cat((gate_up_bias[index, ::2], gate_up_bias[index, 1::2])),
            down_bias[index],
        )


def make_feed_forward(
    loader: WeightLoader, experts: MoEConfig | None, layer: str, norm: str
) -> FeedForward:
    """The feed-forward of the checkpoint's `layer`; `norm` is that of `WeightLoader.output`."""
    if experts is None:
        return DenseFeedForward(loader, f"{layer}.mlp", norm)
    return MoEFeedForward(loader, experts, layer)
