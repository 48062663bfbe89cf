"""The scales of keys and values in FP8 that a checkpoint may have, under several names."""

from __future__ import annotations

import math

from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.config.kv_scale import KVScale
from kvrelay.model_runner.errors import CheckpointError

_KEY_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
"""The names below a layer's ``self_attn``: compressed-tensors', now and before, and AutoFP8's."""
_VALUE_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
_QUERY_NAME = "q_scale"
"""The scale of queries, which is not used: queries are not rounded."""


def take_kv_scales(checkpoint: Checkpoint, num_layers: int) -> tuple[KVScale, ...]:
    """Take one for each layer; it is 1 where the checkpoint has none.

    Raises:
        CheckpointError: a scale is not positive.
    """
    skip_kv_scales(checkpoint, num_layers)
    prefixes = [_prefix(layer) for layer in range(num_layers)]
    return tuple(
        KVScale(_take(checkpoint, one, _KEY_NAMES), _take(checkpoint, one, _VALUE_NAMES))
        for one in prefixes
    )


def skip_kv_scales(checkpoint: Checkpoint, num_layers: int) -> None:
    """Skip the scales: pages are not in FP8."""
    for layer in range(num_layers):
        for name in (*_KEY_NAMES, *_VALUE_NAMES, _QUERY_NAME):
            checkpoint.skip(f"{_prefix(layer)}.{name}")


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def _take(checkpoint: Checkpoint, prefix: str, names: tuple[str, ...]) -> float:
    name = next((name for name in names if f"{prefix}.{name}" in checkpoint), None)
    if name is None:
        return 1.0
    scale = checkpoint.take_number(f"{prefix}.{name}")
    if not math.isfinite(scale) or scale <= 0:
        raise CheckpointError(f"tensor {prefix}.{name} must be positive, got {scale}")
    return scale
