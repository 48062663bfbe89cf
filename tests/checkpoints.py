"""Tiny random checkpoints: every tensor of a real architecture, at a thousandth of its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

VOCAB_SIZE = 512
CORPUS = (
    "the quick brown fox jumps over the lazy dog while seven wizards quietly boil "
    "jugs of mead and prefill workers hand their pages over; naïve café 😀 日本語"
)
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3-window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    ),
    "deepseek": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**_LATENTS, "first_k_dense_replace": 3},
    ),
    "glm4-lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {
            **_LATENTS,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "youtu": (YoutuConfig, YoutuForCausalLM, _LATENTS),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "use_qk_norm": True,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {**_EXPERTS, "intermediate_size": 32, "head_dim": 32, "rotary_dim": 16},
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            **_EXPERTS,
            "intermediate_size": 32,
            "head_dim": 32,
            "sliding_window": 8,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def make_checkpoint(folder: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """Save a random model and a byte-level tokenizer of `VOCAB_SIZE` tokens to `folder`."""
    config_class, model_class, extra = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **extra}))
    # Wide weights, so that logits differ clearly and greedy paths are not all one token.
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    model.to(torch.float32).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of `token`, which must be in the vocabulary."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def make_tokenizer() -> Tokenizer:
    """A small byte-level BPE that can spell everything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer
