"""Tiny random models of every architecture, saved by transformers, which computes their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    LlavaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    YoutuConfig,
)

VOCAB_SIZE = 131
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


def _mrope(*sections: int) -> dict[str, Any]:
    """The turning of text and images; text alone turns as by the default."""
    return _rope("default", mrope_section=list(sections))


_VISION = {
    "hidden_size": 16,
    "out_hidden_size": 64,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
_DEEP = {**_SHAPE, "num_hidden_layers": 3}
_LATENT = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
# Small weights: wide products of large ones amplify what is rounded.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.06}
_WIDE_LATENT = {
    **_LATENT,
    **_WIDE,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}
_LATENT_YARN = _rope(
    "yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, original_max_position_embeddings=32
)

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-mha": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4}),
    "llama-linear": lambda: LlamaConfig(**_SHAPE, **_rope("linear", factor=4.0)),
    "llama-llama3": lambda: LlamaConfig(
        **_SHAPE,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": lambda: LlamaConfig(
        **_SHAPE, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=24, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_SHAPE, sliding_window=20),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-window": lambda: Qwen2Config(
        **_DEEP, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "qwen3-window": lambda: Qwen3Config(
        **_DEEP,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "granite": lambda: GraniteConfig(
        **_SHAPE,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.5,
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE, pad_token_id=None),
    "olmo3": lambda: Olmo3Config(
        **{**_SHAPE, "num_hidden_layers": 4},
        pad_token_id=None,
        sliding_window=10,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **_DEEP,
        head_dim=24,
        sliding_window=11,
        query_pre_attn_scalar=30,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_DEEP,
        head_dim=24,
        sliding_window=9,
        query_pre_attn_scalar=30,
        sliding_window_pattern=2,
        tie_word_embeddings=False,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "deepseek-v2": lambda: DeepseekV2Config(**_LATENT, q_lora_rank=None, mlp_bias=True),
    "deepseek-v2-yarn": lambda: DeepseekV2Config(**_LATENT, **_LATENT_YARN, q_lora_rank=20),
    "deepseek-v3": lambda: DeepseekV3Config(**_LATENT, q_lora_rank=20, attention_bias=True),
    "deepseek-v2-experts": lambda: DeepseekV2Config(
        **{**_LATENT, **_EXPERTS}, q_lora_rank=None, n_group=1, topk_group=1
    ),
    "deepseek-v2-groups": lambda: DeepseekV2Config(
        **{**_LATENT, **_EXPERTS},
        q_lora_rank=None,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
    ),
    "deepseek-v3-experts": lambda: DeepseekV3Config(
        **{**_LATENT, **_EXPERTS}, n_group=4, topk_group=2
    ),
    "kimi-k2": lambda: DeepseekV3Config(
        **{**_LATENT, **_EXPERTS, "n_shared_experts": 1},
        **_rope(
            "yarn", factor=4.0, mscale=1, mscale_all_dim=1, original_max_position_embeddings=32
        ),
        n_group=1,
        topk_group=1,
    ),
    "gemma3-4b": lambda: Gemma3TextConfig(
        **{**_DEEP, "num_attention_heads": 8, "num_key_value_heads": 4},
        head_dim=16,
        sliding_window=9,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    ),
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
        text_config={**_SHAPE, **_mrope(2, 3, 3)}, vision_config=_VISION
    ),
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config={**_SHAPE, "head_dim": 32, **_mrope(8, 4, 4)}, vision_config=_VISION
    ),
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**_SHAPE), vision_config={**_VISION, "num_hidden_layers": 1}
    ),
    "glm4-lite-experts": lambda: Glm4MoeLiteConfig(
        **{**_LATENT, **_EXPERTS, "first_k_dense_replace": 0},
        q_lora_rank=20,
        mlp_layer_types=["sparse", "dense"],
    ),
    "youtu": lambda: YoutuConfig(**_LATENT, q_lora_rank=20),
    "mixtral-experts": lambda: MixtralConfig(
        **_DEEP, sliding_window=20, num_local_experts=8, num_experts_per_tok=3
    ),
    "qwen2-experts": lambda: Qwen2MoeConfig(
        **{**_DEEP, "initializer_range": 0.12},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3-experts": lambda: Qwen3MoeConfig(
        **_DEEP,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "glm4-experts": lambda: Glm4MoeConfig(
        **{**_SHAPE, **_EXPERTS}, head_dim=24, use_qk_norm=True, attention_bias=True
    ),
    "minimax-experts": lambda: MiniMaxM2Config(
        **_SHAPE, head_dim=24, rotary_dim=16, num_local_experts=8, num_experts_per_tok=3
    ),
    "gpt-oss-experts": lambda: GptOssConfig(
        **_DEEP,
        head_dim=24,
        sliding_window=12,
        num_local_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=0.5,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    ),
    "llama-wide": lambda: LlamaConfig(
        **{**_SHAPE, **_WIDE, "num_attention_heads": 2}, head_dim=128
    ),
    "deepseek-flashinfer": lambda: DeepseekV3Config(
        **{**_WIDE_LATENT, "num_attention_heads": 16, "num_key_value_heads": 16},
        q_lora_rank=128,
    ),
    "deepseek-wide": lambda: DeepseekV3Config(**_WIDE_LATENT, q_lora_rank=128),
    "deepseek-v3-halves": lambda: DeepseekV3Config(
        **_LATENT, **_LATENT_YARN, q_lora_rank=None, rope_interleave=False
    ),
}
"""The wide ones have products of whole blocks of FP8."""


def save_random_model(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A seeded model of `config` in float32, saved to `folder`."""
    torch.manual_seed(1)
    for_images = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if for_images else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Biases and norms start out as zeros and ones, which would hide a mix-up.
            if name.endswith(("bias", "sinks")) or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


class Models:
    """Saved models by a key of `CONFIGS`, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, PreTrainedModel] = {}

    def folder(self, name: str) -> Path:
        self.reference(name)
        return self._root / name

    def reference(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            self._models[name] = save_random_model(CONFIGS[name](), self._root / name)
        return self._models[name]

    def logits(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """``[len(tokens), vocab]`` by transformers."""
        with torch.inference_mode():
            return _logits(self.reference(name), tokens)

    def logits_of(self, folder: Path, tokens: Sequence[int]) -> torch.Tensor:
        """The same of a checkpoint."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            return _logits(model, tokens)

    def logits_in_float64(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """The same, computed more precisely, rounded to float32."""
        model = deepcopy(self.reference(name)).double()
        model.set_experts_implementation("eager")  # the others have no float64
        with torch.inference_mode():
            return _logits(model, tokens).float()


def _logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits
