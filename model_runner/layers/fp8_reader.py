"""The reader of a checkpoint's weights that are stored in FP8, with their scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.config.fp8_weights import BLOCK, Fp8Weights, ScaleShape
from kvrelay.model_runner.layers.fp8_weight import FP8, Fp8Weight


class Fp8Reader:
    """A reader of weights by the names of their products; it raises what `Checkpoint` raises.

    Args:
        checkpoint: the model's checkpoint.
        scheme: the checkpoint's quantization.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Fp8Weights) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme
        self._blocks = scheme.scales is ScaleShape.BLOCK

    def has(self, name: str) -> bool:
        """Whether the product `name` is quantized: if it is not, it has no scales."""
        return self._scale_name(name) in self._checkpoint

    def stacks(self, names: Mapping[str, int]) -> bool:
        """Whether the weights of these products (with their outputs) can be one weight in FP8."""
        *upper, _ = names.values()
        aligned = not self._blocks or all(outputs % BLOCK == 0 for outputs in upper)
        return aligned and all(map(self.has, names))

    def take(self, names: Mapping[str, int], inputs: int) -> Fp8Weight:
        """Take the weights of these products, one below the other."""
        scales = [self._take_scales(name, outputs, inputs) for name, outputs in names.items()]
        parts = {f"{name}.weight": outputs for name, outputs in names.items()}
        return Fp8Weight(
            self._checkpoint.take_stacked(parts, (inputs,), FP8),
            torch.cat(scales),
            self._blocks,
            self._take_input_scale(names) if self._scheme.static_inputs else None,
        )

    def _take_scales(self, name: str, outputs: int, inputs: int) -> torch.Tensor:
        """Take the scales of one product, in the shape of `Fp8Weight.scales`."""
        match self._scheme.scales:
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
