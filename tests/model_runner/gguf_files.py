"""Small GGUF files: a random model of transformers, written as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from kvrelay.model_runner.transformers_model.configuration import quietly
from tests.checkpoints import VOCAB_SIZE, make_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Kind:
    """An architecture of GGUF, and how its files differ from a checkpoint."""

    model_type: str
    """transformers' name."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, beside those of SHAPE."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the file that the reader leaves out."""
    permutes: bool = False
    """Query and key weights have neighbouring dimensions that rotate together."""
    unit_norms: bool = False
    """Norm weights are stored plus one."""


KINDS: dict[str, Kind] = {
    "llama": Kind("llama", permutes=True),
    "qwen2": Kind("qwen2"),
    "qwen3": Kind("qwen3", {"head_dim": 32}, {"attention.key_length": 32}),
    "qwen2moe": Kind(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": Kind(
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 0},
    ),
    "minimax-m2": Kind(
        "minimax_m2",
        {"head_dim": 24, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_feed_forward_length": 96},
    ),
    "gemma2": Kind(
        "gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 11},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        unit_norms=True,
    ),
    "gemma3": Kind(
        "gemma3_text",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "rope_local_base_freq": 300.0,
        },
        {"rope.freq_base_swa": 300.0, "attention.sliding_window_pattern": 6},
        unit_norms=True,
    ),
    "phi3": Kind(
        "phi3",
        {"pad_token_id": 0, "sliding_window": 20},
        {"attention.sliding_window": 20, "rope.scaling.original_context_length": 64},
    ),
    "stablelm": Kind("stablelm", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    "starcoder2": Kind("starcoder2", {"use_bias": True}, {"rope.freq_base": 10000.0}),
    "nemotron": Kind(
        "nemotron",
        {"partial_rotary_factor": 0.5},
        {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5},
        unit_norms=True,
    ),
    "gpt2": Kind("gpt2", {"max_position_embeddings": 1024}),
}
"""By the file's name of them."""


def save_gguf(
    name: str,
    path: Path,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Any:
    """Write a random model of a kind to `path`, with fields and tensors more; return the model."""
    kind = KINDS[name]
    model = _make(kind)
    writer = gguf.GGUFWriter(path, name)
    _write_fields(writer, name, kind, model.config)
    for key, value in (fields or {}).items():
        _write(writer, f"{name}.{key}", value)
    _write_tokenizer(writer)
    names = gguf.get_tensor_name_map(_arch(name), model.config.num_hidden_layers)
    for tensor, weight in model.state_dict().items():
        for stored, values in _stored(kind, names, tensor, weight, model.config):
            writer.add_tensor(stored, np.ascontiguousarray(values.numpy()))
    for tensor, values in (tensors or {}).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _make(kind: Kind) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind.model_type](**{**SHAPE, **kind.fields})
    torch.manual_seed(4)
    with quietly():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def _arch(name: str) -> Any:
    return next(one for one, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _write_fields(writer: Any, name: str, kind: Kind, config: Any) -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    known = GGUF_TO_TRANSFORMERS_MAPPING["config"][kind.model_type.removesuffix("_text")]
    values = {key: getattr(config, field, None) for key, field in known.items() if field}
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope.freq_base" in known:
        values["rope.freq_base"] = float(rope["rope_theta"])
    if "expert_gating_func" in known:
        values["expert_gating_func"] = 2  # a sigmoid
    for key, value in {**values, **kind.written}.items():
        if value is not None:
            _write(writer, f"{name}.{key}", value)


def _write(writer: Any, key: str, value: Any) -> None:
    add = {float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
    add.get(type(value), writer.add_uint32)(key, value)


def _write_tokenizer(writer: Any) -> None:
    tokenizer: Tokenizer = make_tokenizer()
    stored = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    tokens += [f"[unused{index}]" for index in range(len(tokens), VOCAB_SIZE)]
    merges = [" ".join(one) if isinstance(one, list) else one for one in stored["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


def _stored(
    kind: Kind, names: Any, tensor: str, weight: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file that a tensor of the model becomes, with their names."""
    base, _, suffix = tensor.rpartition(".")
    if suffix not in ("weight", "bias"):
        base, suffix = tensor, "weight"
    layer = re.search(r"layers\.(\d+)\.", tensor)
    if base.endswith("experts.gate_up_proj"):
        assert layer
        gate, up = weight.chunk(2, dim=1)
        yield f"blk.{layer[1]}.ffn_gate_exps.weight", gate
        yield f"blk.{layer[1]}.ffn_up_exps.weight", up
        return
    if base.endswith("experts.down_proj"):
        assert layer
        yield f"blk.{layer[1]}.ffn_down_exps.weight", weight
        return
    if tensor.endswith("e_score_correction_bias"):
        assert layer
        yield f"blk.{layer[1]}.exp_probs_b.bias", weight
        return
    if tensor == "lm_head.weight" and config.tie_word_embeddings:
        return
    name = names.get_name(base)
    assert name is not None, tensor
    if kind.permutes and re.search(r"[qk]_proj", tensor):
        heads = config.num_attention_heads if "q_proj" in tensor else config.num_key_value_heads
        weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
    if kind.unit_norms and "norm" in tensor and suffix == "weight":
        weight = weight + 1
    if kind.model_type == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight", tensor):
        weight = weight.T
    if tensor.endswith("shared_expert_gate.weight"):
        weight = weight[0]
    yield f"{name}.{suffix}", weight
