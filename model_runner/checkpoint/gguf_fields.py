"""The part of a GGUF file's description that transformers' reader leaves out.

The reader takes the fields that it knows, and the defaults of a class for all others. A stretched
rotation, another base or a window would be lost without a word, and the model be another one. So
the configuration takes over what it has a field for, and a file is refused by the name of the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvrelay.model_runner.errors import CheckpointError

logger = logging.getLogger(__name__)

_ARCHITECTURE: Final = "general.architecture"
_TAKEN_OVER: Final[Mapping[str, str]] = {
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""The fields that become those of a configuration, if it has them."""
_SAYS_NOTHING: Final = ("rope.scaling.finetuned", "rope.scaling.original_context_length")
"""Fields that change no number where their siblings are as they should be."""
_TELLING: Final = ("rope.", "attention.", "expert_", "softcapping", "scale", "clamp")
"""The parts of names of fields that a model's numbers depend on."""
_EPSILONS: Final = (
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
    "layer_norm_eps",
    "layer_norm_epsilon",
)
"""The names that configurations have for what norms add to a square."""
_LLAMA3: Final[Mapping[str, Any]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotation of Llama 3.1 and later, but for its factor: a file has its result alone."""
_GEMMA_27B: Final = (46, 62)
"""The numbers of layers of Gemma 2 27B and Gemma 3 27B."""
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor by which frequencies of a rotation are divided."""


def complete_config(
    path: Path,
    metadata: Mapping[str, Any],
    known: Mapping[str, str | None],
    factors: npt.NDArray[np.float32] | None,
    config: Any,
) -> None:
    """Take over what the reader has left out of `config`.

    Args:
        path: the file, for errors.
        metadata: its fields.
        known: the reader's names of fields, and what becomes of them.
        factors: its `ROPE_FACTORS`, if it has them.
        config: transformers' configuration.

    Raises:
        CheckpointError: one line; it names a field that the configuration cannot say.
    """
    prefix = f"{metadata[_ARCHITECTURE]}."
    own = {
        name.removeprefix(prefix): one for name, one in metadata.items() if name.startswith(prefix)
    }
    for name, field in _TAKEN_OVER.items():
        if name in own and hasattr(config, field) and known.get(name) is None:
            setattr(config, field, own[name] or None)
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = _gemma_scalar(config)
    rope = _rope_of(config)
    if rope is not None:
        _take_over_rope(own, factors, config, rope)
    said = _said_by(config, rope or {})
    for name, value in own.items():
        # The reader takes either the width of a head or the part of it that rotates for the width.
        if known.get(name) not in (None, "head_dim") or name in _SAYS_NOTHING:
            continue
        if name in said and _is_same(value, said[name]):
            continue
        if name in said or any(part in name for part in _TELLING):
            raise CheckpointError(
                f"{path}: {prefix}{name} is {value}, which transformers' reader of GGUF leaves out"
            )
        logger.info("%s: %s%s is left out", path, prefix, name)
    if factors is not None and (rope is None or rope.get("rope_type") != "llama3"):
        raise CheckpointError(f"{path}: {ROPE_FACTORS} is of no rotation that is known")


def _gemma_scalar(config: Any) -> int:
    """The scale of Gemma's scores, which no file has: llama.cpp tells the 27B models by layers."""
    if config.num_hidden_layers in _GEMMA_27B:
        return int(config.hidden_size // config.num_attention_heads)
    return _head_dim(config)


def _rope_of(config: Any) -> dict[str, Any] | None:
    """The parameters of the rotation of layers with full attention; None: it has none."""
    rope: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _rope_of_windows(config: Any) -> dict[str, Any]:
    """The parameters of the rotation of layers with a window; empty: it is that of all layers."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    sliding: dict[str, Any] = rope.get("sliding_attention", {})
    return sliding


def _take_over_rope(
    own: Mapping[str, Any],
    factors: npt.NDArray[np.float32] | None,
    config: Any,
    rope: dict[str, Any],
) -> None:
    head_dim = _head_dim(config)
    if "rope.freq_base" in own:
        rope["rope_theta"] = float(own["rope.freq_base"])
    of_windows = _rope_of_windows(config)
    if of_windows and "rope.freq_base_swa" in own:
        of_windows["rope_theta"] = float(own["rope.freq_base_swa"])
    if "partial_rotary_factor" in rope and "rope.dimension_count" in own:
        rope["partial_rotary_factor"] = own["rope.dimension_count"] / head_dim
    if own.get("rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": float(own["rope.scaling.factor"])}
    if factors is not None:
        llama3: dict[str, Any] = {**rope, **_LLAMA3, "factor": round(float(factors.max()), 3)}
        if np.allclose(factors, _llama3_factors(llama3, head_dim), rtol=1e-4):
            rope |= llama3


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> npt.NDArray[np.float64]:
    """The factors that frequencies of Llama 3.1 are divided by."""
    turns = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    turns = turns * rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors


def _said_by(config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file by what a configuration says."""
    head_dim, kind = _head_dim(config), rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0)
    epsilon = next((getattr(config, one) for one in _EPSILONS if hasattr(config, one)), None)
    layers = getattr(config, "layer_types", None) or ()
    said: dict[str, Any] = {
        "attention.causal": True,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": epsilon,
        "attention.layer_norm_rms_epsilon": epsilon,
        "attention.sliding_window_pattern": [one == "sliding_attention" for one in layers],
        "rope.dimension_count": int(head_dim * partial),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": _rope_of_windows(config).get("rope_theta"),
        "rope.scaling.type": "none" if kind in ("default", "llama3") else kind,
        "rope.scaling.factor": rope.get("factor", 1.0),
        "rope.scaling.attn_factor": 1.0,
        "expert_feed_forward_length": getattr(config, "intermediate_size", None),
        "expert_shared_feed_forward_length": 0,
    }
    return said | {
        name: getattr(config, field)
        for name, field in _TAKEN_OVER.items()
        if hasattr(config, field)
    }


def _head_dim(config: Any) -> int:
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(other, list) and isinstance(value, int):  # the last of so many layers differs
        return value > 0 and other == [bool((index + 1) % value) for index in range(len(other))]
    if isinstance(value, float) and other is not None and not isinstance(other, str):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other or (not value and not other))
