"""A small random model of the same code: every rule of a configuration stays, sizes are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from kvrelay.model_runner.transformers_model.configuration import make_model, quietly
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError

WINDOW: Final = 8
"""The length that windows and chunks are cut to, in tokens."""
PRETRAINED: Final = 16
"""The length that a model was pretrained with, after it is cut."""
_HEAD_DIM: Final = 16
_LEAST_LAYERS: Final = 4
_MOST_KINDS: Final = 6
_SPECIAL_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BY_INDEX: Final = "per_layer_config"
"""The field that says what some layers have of their own."""

_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dim_ff", "dff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "dim_head"), _HEAD_DIM),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 131),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("floor_scale", "attention_window"), WINDOW),
    "original_max_position_embeddings": PRETRAINED,
    "global_head_dim": 2 * _HEAD_DIM,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "rotary_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_kv_shared_layers": 2,
}
"""The sizes that fields are cut to, by their names; smaller values stay."""


def shrink(config: Any) -> Any:
    """Make the configuration of a small model with the rules of `config`."""
    fields = config.to_dict()
    names = getattr(type(config), "attribute_map", {})
    layers = names.get("num_hidden_layers", "num_hidden_layers")
    if layers not in fields:
        layers = "num_layers"
    if layers not in fields:
        raise ModelCodeError("it takes more than text, or its configuration says no layers")
    num_layers, by_index = fields[layers], _by_index(fields)
    order = _kept_layers(fields, num_layers, by_index)
    small = {name: _cut(name, value, num_layers, order) for name, value in fields.items()}
    if by_index:
        small[_BY_INDEX] = {
            str(place): _cut_one_layer(by_index[index], fields)
            for place, index in enumerate(order)
            if index in by_index
        }
    small |= {name: one for name, one in _SPECIAL_TOKENS.items() if fields.get(name) is not None}
    small[layers] = len(order)
    return type(config).from_dict(small | _cut_heads(fields, names))


def _by_index(fields: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The fields that some layers have of their own, by their index."""
    return {int(index): own for index, own in (fields.get(_BY_INDEX) or {}).items()}


def _kept_layers(
    fields: Mapping[str, Any], num_layers: int, by_index: Mapping[int, Mapping[str, Any]]
) -> list[int]:
    """The layers to keep: one of each kind, and all of them again until there are a few."""
    lists = [one for one in fields.values() if _is_by_layer(one, num_layers)]
    kinds = [
        (*(str(one[index]) for one in lists), str(by_index.get(index)))
        for index in range(num_layers)
    ]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return firsts * -(-_LEAST_LAYERS // len(firsts))


def _is_by_layer(value: object, num_layers: int) -> bool:
    """Whether a field has a value for each layer; lists of layers themselves have too many."""
    if not isinstance(value, list) or not len(value) == num_layers > 1:
        return False
    return len(set(map(str, value))) <= _MOST_KINDS


def _cut(name: str, value: Any, num_layers: int, order: list[int]) -> Any:
    if _is_by_layer(value, num_layers):
        return [_cut(name, value[index], num_layers, order) for index in order]
    if name in ("short_factor", "long_factor"):
        return value[: _HEAD_DIM // 2]
    if isinstance(value, dict):
        return {key: _cut(key, one, num_layers, order) for key, one in value.items()}
    if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return min(value, _SIZES[name])
    return value


def _cut_one_layer(own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the fields that one layer has of its own; wider heads than others' stay wider."""
    cut = {name: _cut(name, value, 0, []) for name, value in own.items()}
    if own.get("head_dim", 0) > fields.get("head_dim", own.get("head_dim", 0)):
        cut["head_dim"] *= 2
    return cut


def _cut_heads(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Few heads, with one, two or four to each head of keys."""
    own = names.get("num_attention_heads", "num_attention_heads")
    keys = names.get("num_key_value_heads", "num_key_value_heads")
    heads, kv_heads = fields[own], fields.get(keys)
    if kv_heads is None or kv_heads == heads or "kv_lora_rank" in fields:
        cut = {own: 4} | ({} if kv_heads is None else {keys: 4})
    elif kv_heads == 1:
        cut = {own: 4, keys: 1}
    else:
        cut = {own: 4 if heads // kv_heads < 4 else 8, keys: 2}
    head_dim = fields.get("head_dim")
    if head_dim is None:
        cut[names.get("hidden_size", "hidden_size")] = cut[own] * _HEAD_DIM
    elif head_dim == fields.get("qk_rope_head_dim"):
        cut["head_dim"] = _SIZES["qk_rope_head_dim"]
    return cut


def make_small_model(config: Any, architecture: str, seed: int = 1) -> Any:
    """Make a model of a small configuration, in float32, with weights that hide no mistake.

    Random numbers of others are left as they are.
    """
    with torch.random.fork_rng(devices=()), quietly():
        torch.manual_seed(seed)
        model = make_model(config, architecture)
        with torch.no_grad():
            for weight in model.parameters():
                _randomize(weight)
    return model


def _randomize(weight: torch.Tensor) -> None:
    """Products keep their inputs' size; norms and biases are not ones and zeros."""
    noise = torch.randn_like(weight)
    if weight.ndim < 2:
        weight.add_(noise * 0.2)
    else:
        weight.copy_(noise * 1.4 * weight.shape[-1] ** -0.5)
