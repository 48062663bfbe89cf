"""The loader that makes the parts of a decoder from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.checkpoint.packed_weight import PackedWeight
from kvrelay.model_runner.config.fp8_weights import BLOCK, Fp8Weights, ScaleShape
from kvrelay.model_runner.config.model_config import ModelConfig
from kvrelay.model_runner.layers.elementwise import Elementwise, NormWeight
from kvrelay.model_runner.layers.experts.expert_factory import ExpertFactory
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight
from kvrelay.model_runner.layers.hidden import Hidden
from kvrelay.model_runner.layers.linear import Linear, LinearFactory
from kvrelay.model_runner.layers.norm import NoNorm, Norm


class OutputProjection(Protocol):
    """The product that ends a half layer."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual [T, hidden_size]`` and the product of ``x [T, in]``."""
        ...


class PlainOutputProjection:
    """An `OutputProjection` whose product adds to the residual itself."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual [T, hidden_size]`` and the product of ``x [T, in]``."""
        return Hidden(self._linear.add_to(residual, x))


class DeferringOutputProjection:
    """An `OutputProjection` that leaves the sum to the next norm.

    Args:
        linear: the product.
        norm: the norm of the product, if the model has one.
    """

    def __init__(self, linear: Linear, norm: Norm | None) -> None:
        self._linear = linear
        self._norm = norm

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual [T, hidden_size]`` and the product of ``x [T, in]``."""
        product = self._linear(x)
        return Hidden(residual, product if self._norm is None else self._norm(product))


class NormedOutputProjection:
    """An `OutputProjection` whose product is normalized before it is added."""

    def __init__(self, linear: Linear, norm: Norm) -> None:
        self._linear = linear
        self._norm = norm

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual [T, hidden_size]`` and the normalized product of ``x [T, in]``."""
        return Hidden(residual + self._norm(self._linear(x)))


class ScaledOutputProjection:
    """An `OutputProjection` whose product is multiplied by a number before it is added."""

    def __init__(self, linear: Linear, multiplier: float, defers: bool) -> None:
        self._linear = linear
        self._multiplier = multiplier
        self._defers = defers

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Hidden:
        """``residual [T, hidden_size]`` and the multiplied product of ``x [T, in]``."""
        product = self._linear(x) * self._multiplier
        return Hidden(residual, product) if self._defers else Hidden(residual + product)


class WeightLoader:
    """A loader of tensors by name; methods raise `CheckpointError` as `Checkpoint.take` does."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        elementwise: Elementwise,
        linears: LinearFactory,
        experts: ExpertFactory,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.elementwise = elementwise
        self.linears = linears
        self.experts = experts
        self._fp8 = Fp8Reader(checkpoint)

    def norm(self, name: str, size: int, eps: float | None = None) -> Norm:
        """The norm `name`; `eps` is the model's unless given."""
        eps = self.config.rms_norm_eps if eps is None else eps
        return Norm(self.elementwise, self.norm_weight(name, size), eps)

    def pre_norm(self, name: str) -> Norm | NoNorm:
        """The norm `name` of what a half of a layer reads, if the model has any."""
        return self.norm(name, self.config.hidden_size) if self.config.pre_norms else NoNorm()

    def norm_weight(self, name: str, size: int) -> NormWeight:
        """The weight ``[size]`` of the norm `name`."""
        stored = self.checkpoint.take(f"{name}.weight", (size,))
        return NormWeight.of(stored, self.config.add_unit_offset)

    def linear(
        self,
        prefix: str,
        parts: dict[str, int],
        inputs: int,
        has_bias: bool = False,
        order: Int64Array | None = None,
    ) -> Linear:
        """One product for several of the checkpoint: `parts` maps their names to output sizes.

        With an `order`, output ``i`` is the checkpoint's ``order[i]``.
        """
        packed = self._take_packed(_join(prefix, parts), inputs)
        weight = self.stacked_weight(prefix, parts, inputs) if packed is None else packed
        bias = self.stacked_bias(prefix, parts) if has_bias else None
        if bias is not None:
            bias = _ordered(bias, order)
        if isinstance(weight, PackedWeight):
            rows = None if order is None else torch.from_numpy(order)
            weight = weight if rows is None else weight.reorder(rows)
            return self.linears.make_packed(weight, bias, self.checkpoint.dtype)
        if not isinstance(weight, Fp8Weight):
            return self.linears.make(_ordered(weight, order), bias)
        if order is None or weight.keeps_scales(order):
            weight = weight if order is None else weight.reorder(order)
            return self.linears.make_fp8(weight, bias, self.checkpoint.dtype)
        return self.linears.make(_ordered(weight.dequantize(self.checkpoint.dtype), order), bias)

    def stacked_weight(
        self, prefix: str, parts: dict[str, int], inputs: int
    ) -> torch.Tensor | Fp8Weight:
        """The weights of several products, one below the other; arguments are those of `linear`."""
        names = _join(prefix, parts)
        if not self._fp8.stacks(names):
            return self._take_plain(names, inputs)
        return self._fp8.take(names, inputs)

    def stacked_bias(self, prefix: str, parts: dict[str, int]) -> torch.Tensor:
        """The biases of several products, one behind the other."""
        return self._take_stacked(_join(prefix, parts), "bias", ())

    def weight(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """The weight of the product `name`, ``[out, in]`` in the model's dtype."""
        return self._take_plain({name: shape[0]}, shape[1])

    def head(self, name: str, shape: tuple[int, int]) -> Linear:
        """The product `name` that computes logits; what is in FP8 is dequantized."""
        weight = self._take_packed({name: shape[0]}, shape[1])
        if isinstance(weight, PackedWeight):
            return self.linears.make_packed(weight, None, self.checkpoint.dtype)
        return self.linears.make(self.weight(name, shape) if weight is None else weight)

    def output(
        self, prefix: str, name: str, inputs: int, has_bias: bool, norm: str
    ) -> OutputProjection:
        """The product `name`, followed by the `norm` if the model has norms there."""
        hidden_size = self.config.hidden_size
        linear = self.linear(prefix, {name: hidden_size}, inputs, has_bias)
        after = self.norm(norm, hidden_size) if self.config.post_norms else None
        multiplier, defers = self.config.residual_multiplier, self.elementwise.adds_in_norms
        if multiplier != 1:
            assert after is None, "no architecture has both"
            return ScaledOutputProjection(linear, multiplier, defers)
        if defers:
            return DeferringOutputProjection(linear, after)
        if after is None:
            return PlainOutputProjection(linear)
        return NormedOutputProjection(linear, after)

    def _take_packed(
        self, names: Mapping[str, int], inputs: int
    ) -> PackedWeight | torch.Tensor | None:
        """The weights of these products in few bits, or dequantized if they cannot be one weight.

        None: they are not stored so, or no product would have them so.
        """
        checkpoint, dtype = self.checkpoint, self.checkpoint.dtype
        if not self.linears.takes_packed(dtype, checkpoint.device):
            return None
        if not all(checkpoint.is_packed(f"{name}.weight") for name in names):
            return None
        parts = [
            checkpoint.take_packed(f"{name}.weight", (outputs, inputs))
            for name, outputs in names.items()
        ]
        stacked = PackedWeight.stack(parts)
        return torch.cat([one.dequantize(dtype) for one in parts]) if stacked is None else stacked

    def _take_plain(self, names: Mapping[str, int], inputs: int) -> torch.Tensor:
        """The weights of these products, one below the other, in the model's dtype."""
        if not any(map(self._fp8.has, names)):
            return self._take_stacked(names, "weight", (inputs,))
        return torch.cat(
            [
                self._fp8.take({name: outputs}, inputs).dequantize(self.checkpoint.dtype)
                if self._fp8.has(name)
                else self.checkpoint.take(f"{name}.weight", (outputs, inputs))
                for name, outputs in names.items()
            ]
        )

    def _take_stacked(
        self, names: Mapping[str, int], kind: str, inner: tuple[int, ...]
    ) -> torch.Tensor:
        parts = {f"{name}.{kind}": outputs for name, outputs in names.items()}
        return self.checkpoint.take_stacked(parts, inner)


def _join(prefix: str, parts: dict[str, int]) -> dict[str, int]:
    return {f"{prefix}.{name}": outputs for name, outputs in parts.items()}


def _ordered(rows: torch.Tensor, order: Int64Array | None) -> torch.Tensor:
    return rows if order is None else rows[torch.from_numpy(order)]


class Fp8Reader:
    """A reader of weights by the names of their products; it raises what `Checkpoint` raises.

    Args:
        checkpoint: the model's checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def has(self, name: str) -> bool:
        """Whether the product `name` is in FP8."""
        return self.scheme(name) is not None

    def scheme(self, name: str) -> Fp8Weights | None:
        """The scheme of the product `name`; None: it is not in FP8, so it has no scales of it."""
        scheme = self._checkpoint.scheme_of(name)
        if isinstance(scheme, Fp8Weights) and self._scale_name(name) in self._checkpoint:
            return scheme
        return None

    def stacks(self, names: Mapping[str, int]) -> bool:
        """Whether the weights of these products (with their outputs) can be one weight in FP8."""
        if not all(map(self.has, names)):
            return False
        scheme, *others = {self.scheme(name) for name in names}
        *upper, _ = names.values()
        assert scheme is not None
        blocks = scheme.scales is ScaleShape.BLOCK
        return not others and (not blocks or all(outputs % BLOCK == 0 for outputs in upper))

    def take(self, names: Mapping[str, int], inputs: int) -> Fp8Weight:
        """Take the weights of these products, one below the other; they have one scheme."""
        scheme = self.scheme(next(iter(names)))
        assert scheme is not None
        scales = [
            self._take_scales(scheme.scales, name, outputs, inputs)
            for name, outputs in names.items()
        ]
        parts = {f"{name}.weight": outputs for name, outputs in names.items()}
        return Fp8Weight(
            self._checkpoint.take_stacked(parts, (inputs,), FP8),
            torch.cat(scales),
            scheme.scales is ScaleShape.BLOCK,
            self._take_input_scale(names) if scheme.static_inputs else None,
        )

    def _take_scales(self, kind: ScaleShape, name: str, outputs: int, inputs: int) -> torch.Tensor:
        """Take the scales of one product, in the shape of `Fp8Weight.scales`."""
        match kind:
            case ScaleShape.TENSOR:
                return self._checkpoint.take_scales(self._scale_name(name), (1, 1)).expand(
                    outputs, 1
                )
            case ScaleShape.CHANNEL:
                shape = (outputs, 1)
            case ScaleShape.BLOCK:
                shape = (-(-outputs // BLOCK), -(-inputs // BLOCK))
        return self._checkpoint.take_scales(self._scale_name(name), shape)

    def _take_input_scale(self, names: Mapping[str, int]) -> torch.Tensor:
        """``[]``: the largest input scale of products that share inputs, so that all fit."""
        scales = [self._checkpoint.take_scales(f"{name}.input_scale", ()) for name in names]
        return torch.stack(scales).max()

    def _scale_name(self, name: str) -> str:
        """The name of the scales; DeepSeek's (``_inv``) and all others' have the same meaning.

        DeepSeek's name says that weights were divided by the scale, and so they were in all
        checkpoints.
        """
        inverse = f"{name}.weight_scale_inv"
        return inverse if inverse in self._checkpoint else f"{name}.weight_scale"
