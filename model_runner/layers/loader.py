"""Makes the pieces of a decoder from a checkpoint's tensors."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.config.model_config import ModelConfig
from kvrelay.model_runner.layers.elementwise import Elementwise
from kvrelay.model_runner.layers.linear import Linear, LinearFactory
from kvrelay.model_runner.layers.norm import Norm


class OutputProjection(Protocol):
    """The product that ends a half layer; `Linear` is one."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, hidden_size]`` and the product of ``x [T, in]``."""
        ...


class NormedOutputProjection:
    """An `OutputProjection` whose product is normalized before it is added."""

    def __init__(self, linear: Linear, norm: Norm) -> None:
        self._linear = linear
        self._norm = norm

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual [T, hidden_size]`` and the normalized product of ``x [T, in]``."""
        return residual + self._norm(self._linear(x))


class WeightLoader:
    """Takes tensors by name; every method raises `CheckpointError` as `Checkpoint.take` does."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        elementwise: Elementwise,
        linears: LinearFactory,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.elementwise = elementwise
        self.linears = linears

    def norm(self, name: str, size: int, eps: float | None = None) -> Norm:
        """The norm `name`; `eps` is the model's unless given."""
        eps = self.config.rms_norm_eps if eps is None else eps
        return Norm(self.elementwise, self.norm_weight(name, size), eps)

    def norm_weight(self, name: str, size: int) -> torch.Tensor:
        """``[size]``; float32 where it was stored less one, else of the model's dtype."""
        weight = self.checkpoint.take(f"{name}.weight", (size,))
        return weight.to(torch.float32) + 1 if self.config.add_unit_offset else weight

    def linear(
        self,
        prefix: str,
        parts: dict[str, int],
        inputs: int,
        has_bias: bool = False,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """One product for several of the checkpoint's: `parts` maps their names to output sizes.

        With an `order`, output ``i`` is the checkpoint's ``order[i]``.
        """
        weight = torch.cat(
            [
                self._take(prefix, name, "weight", (outputs, inputs))
                for name, outputs in parts.items()
            ]
        )
        bias = None
        if has_bias:
            bias = torch.cat(
                [self._take(prefix, name, "bias", (outputs,)) for name, outputs in parts.items()]
            )
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return self.linears.make(weight, bias)

    def output(
        self, prefix: str, name: str, inputs: int, has_bias: bool, norm: str
    ) -> OutputProjection:
        """The product `name`, followed by the `norm` where the model has norms there."""
        hidden_size = self.config.hidden_size
        linear = self.linear(prefix, {name: hidden_size}, inputs, has_bias)
        if not self.config.post_norms:
            return linear
        return NormedOutputProjection(linear, self.norm(norm, hidden_size))

    def _take(self, prefix: str, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.take(f"{prefix}.{name}.{kind}", shape)
