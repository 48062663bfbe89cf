"""The reader of config.json, which refuses by name what `Decoder` would not compute exactly."""

from __future__ import annotations

from pathlib import Path

from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.layer_reader import read_layers
from kvrelay.model_runner.checkpoint.quantization_reader import read_quantization
from kvrelay.model_runner.checkpoint.rope_reader import read_latent_scale
from kvrelay.model_runner.config.model_config import (
    Activation,
    Architecture,
    GQAConfig,
    MLAConfig,
    ModelConfig,
)
from kvrelay.model_runner.errors import UnknownArchitectureError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
_GEMMA = (Architecture.GEMMA2, Architecture.GEMMA3)
_DEEPSEEK = (Architecture.DEEPSEEK_V2, Architecture.DEEPSEEK_V3)
_Q_LORA_RANK = 1536
"""The `q_lora_rank` that transformers assumes if a DeepSeek's config.json has none."""
_ATTN_SOFTCAP, _FINAL_SOFTCAP = 50.0, 30.0
"""The same for Gemma 2's `attn_logit_softcapping` and `final_logit_softcapping`."""


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json (and generation_config.json where there is one).

    Raise `CheckpointError`, one line that names file and field, for anything missing, invalid, or
    not computed exactly by `Decoder`.
    """
    config = ConfigFile.read(folder / CONFIG_NAME)
    architecture = _architecture(config)
    gemma = architecture in _GEMMA
    hidden_size, vocab_size = config.size("hidden_size"), config.size("vocab_size")
    max_model_len = config.size("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=vocab_size,
        layers=read_layers(config, architecture, max_model_len),
        attention=_read_attention(config, architecture),
        activation=_activation(config, gemma),
        rms_norm_eps=config.number("rms_norm_eps"),
        mlp_bias=architecture in (Architecture.LLAMA, Architecture.DEEPSEEK_V2)
        and config.flag("mlp_bias", False),
        tie_word_embeddings=config.flag("tie_word_embeddings", gemma),
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(config, folder, vocab_size),
        post_norms=gemma,
        add_unit_offset=gemma,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        final_logit_softcapping=_logit_softcap(config, architecture),
        fp8_weights=read_quantization(config),
    )


def _architecture(config: ConfigFile) -> Architecture:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.error("architectures", f"must name one architecture, got {names!r}")
    try:
        return Architecture(names[0])
    except ValueError:
        supported = ", ".join(Architecture)
        error = config.error(
            "architectures", f"{names[0]!r} is not supported (these are: {supported})"
        )
        raise UnknownArchitectureError(str(error)) from None


def _activation(config: ConfigFile, gemma: bool) -> Activation:
    field = "hidden_activation" if gemma else "hidden_act"
    expected = Activation.GELU_TANH if gemma else Activation.SILU
    activation = config.text(field, expected)
    if activation != expected:
        raise config.error(field, f"must be {expected.value!r}, got {activation!r}")
    return expected


def _read_attention(config: ConfigFile, architecture: Architecture) -> GQAConfig | MLAConfig:
    if architecture in _DEEPSEEK:
        return _read_mla(config, architecture)
    if architecture in _GEMMA:
        return _read_gemma_attention(config, architecture)
    num_heads, num_kv_heads = _head_counts(config)
    head_dim = _head_dim(config, num_heads)
    by_config = architecture in (Architecture.LLAMA, Architecture.QWEN3)
    bias = by_config and config.flag("attention_bias", False)
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=bias or architecture is Architecture.QWEN2,
        output_bias=bias,
        qk_norm=architecture is Architecture.QWEN3,
    )


def _read_gemma_attention(config: ConfigFile, architecture: Architecture) -> GQAConfig:
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "is true: only causal is supported")
    gemma2 = architecture is Architecture.GEMMA2
    softcap = config.number_or_none("attn_logit_softcapping", _ATTN_SOFTCAP if gemma2 else None)
    if softcap is not None and not gemma2:
        raise config.error("attn_logit_softcapping", "is not supported in this architecture")
    num_heads, num_kv_heads = _head_counts(config)
    bias = config.flag("attention_bias", False)
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_even(config, "head_dim"),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=softcap,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=not gemma2,
    )


def _read_mla(config: ConfigFile, architecture: Architecture) -> MLAConfig:
    num_heads, num_kv_heads = _head_counts(config)
    if num_kv_heads != num_heads:
        raise config.error("num_key_value_heads", f"must be {num_heads}: every head has a key")
    qk_nope_head_dim = config.size("qk_nope_head_dim")
    qk_rope_head_dim = _even(config, "qk_rope_head_dim")
    v3 = architecture is Architecture.DEEPSEEK_V3
    return MLAConfig(
        num_heads=num_heads,
        q_lora_rank=config.size_or_none("q_lora_rank", _Q_LORA_RANK),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=config.size("v_head_dim"),
        scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * read_latent_scale(config),
        attention_bias=config.flag("attention_bias", False),
        rope_interleave=config.flag("rope_interleave", True) if v3 else True,
    )


def _head_counts(config: ConfigFile) -> tuple[int, int]:
    """`num_heads, num_kv_heads`."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"of {num_kv_heads} does not divide {num_heads} attention heads"
        )
    return num_heads, num_kv_heads


def _head_dim(config: ConfigFile, num_heads: int) -> int:
    if config.has("head_dim"):
        return _even(config, "head_dim")
    hidden_size = config.size("hidden_size")
    if hidden_size % (2 * num_heads):
        raise config.error(
            "hidden_size", f"of {hidden_size} is no even multiple of {num_heads} attention heads"
        )
    return hidden_size // num_heads


def _even(config: ConfigFile, field: str) -> int:
    value = config.size(field)
    if value % 2:
        raise config.error(field, f"must be even, got {value}")
    return value


def _logit_softcap(config: ConfigFile, architecture: Architecture) -> float | None:
    if architecture not in _GEMMA:
        return None
    default = _FINAL_SOFTCAP if architecture is Architecture.GEMMA2 else None
    return config.number_or_none("final_logit_softcapping", default)


def read_eos_token_ids(config: ConfigFile, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the end-of-sequence tokens of `folder`: generation_config.json has the last word."""
    ids = config.token_ids("eos_token_id", vocab_size)
    generation_path = folder / GENERATION_CONFIG_NAME
    if generation_path.exists():
        generation = ConfigFile.read(generation_path)
        ids = generation.token_ids("eos_token_id", vocab_size) or ids
    return tuple(sorted(set(ids)))
