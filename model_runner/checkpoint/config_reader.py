"""The reader of config.json, which refuses by name what `Decoder` would not compute exactly."""

from __future__ import annotations

from pathlib import Path

from kvrelay.model_runner.checkpoint.architectures import (
    ARCHITECTURES,
    DecoderOptions,
    has,
)
from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.checkpoint.layer_reader import read_layers
from kvrelay.model_runner.checkpoint.quantization_reader import read_quantization
from kvrelay.model_runner.checkpoint.rope_reader import read_latent_scale, read_partial_factor
from kvrelay.model_runner.checkpoint.text_section import find_architecture
from kvrelay.model_runner.config.model_config import (
    Activation,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    QKNorm,
)

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json (and generation_config.json where there is one).

    Raise `CheckpointError`, one line that names file and field, for anything missing, invalid, or
    not computed exactly by `Decoder`.
    """
    architecture, config = find_architecture(ConfigFile.read(folder / CONFIG_NAME))
    options = ARCHITECTURES[architecture]
    hidden_size, vocab_size = config.size("hidden_size"), config.size("vocab_size")
    max_model_len = config.size("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=vocab_size,
        layers=read_layers(config, options, max_model_len),
        attention=_read_mla(config, options) if options.is_latent else _read_gqa(config, options),
        activation=_activation(config, options),
        rms_norm_eps=config.number("rms_norm_eps"),
        mlp_bias=has(options.mlp_bias, config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(config, folder, vocab_size),
        pre_norms=options.has_pre_norms,
        post_norms=options.has_post_norms,
        add_unit_offset=options.adds_unit_offset,
        embedding_scale=hidden_size**0.5 if options.scales_embeddings else 1.0,
        embedding_multiplier=_multiplier(config, options, "embedding_multiplier"),
        residual_multiplier=_multiplier(config, options, "residual_multiplier"),
        logits_scaling=_multiplier(config, options, "logits_scaling"),
        final_logit_softcapping=_softcap(config, options, "final_logit_softcapping"),
        quantization=read_quantization(config),
    )


def _activation(config: ConfigFile, options: DecoderOptions) -> Activation:
    expected = options.activation
    activation = config.text(options.activation_field, expected)
    if activation != expected:
        raise config.not_native(
            options.activation_field, f"must be {expected.value!r}, got {activation!r}"
        )
    return expected


def _read_gqa(config: ConfigFile, options: DecoderOptions) -> GQAConfig:
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "is true: only causal is supported")
    num_heads, num_kv_heads = _head_counts(config)
    head_dim = _head_dim(config, num_heads)
    scalar = config.number("query_pre_attn_scalar") if options.has_query_scalar else head_dim
    scale = scalar**-0.5
    if options.has_multipliers:
        scale = _multiplier(config, options, "attention_multiplier")
    return GQAConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        softcap=_softcap(config, options, "attn_logit_softcapping"),
        qkv_bias=has(options.qkv_bias, config),
        output_bias=has(options.output_bias, config),
        qk_norm=options.qk_norm if has(options.has_qk_norm, config) else QKNorm.NONE,
        partial_rotary_dim=_partial_rotary_dim(config, options, head_dim),
        has_sinks=options.has_sinks,
    )


def _multiplier(config: ConfigFile, options: DecoderOptions, field: str) -> float:
    if options.has_multipliers:
        return config.number(field, 1.0)
    if config.number(field, 1.0) != 1:
        raise config.error(field, "other than 1 is not supported in this architecture")
    return 1.0


def _softcap(config: ConfigFile, options: DecoderOptions, field: str) -> float | None:
    softcap = config.number_or_none(field, None)
    if softcap is not None and field not in options.defaults:
        raise config.error(field, "is not supported in this architecture")
    return softcap


def _partial_rotary_dim(config: ConfigFile, options: DecoderOptions, head_dim: int) -> int | None:
    if not options.may_rotate_partially:
        return None
    factor = config.size("rotary_dim") / head_dim if config.has("rotary_dim") else 1.0
    rotary_dim = int(head_dim * read_partial_factor(config, factor))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise config.error(
            "partial_rotary_factor", f"turns {rotary_dim} of {head_dim} dimensions: not supported"
        )
    return rotary_dim if rotary_dim < head_dim else None


def _read_mla(config: ConfigFile, options: DecoderOptions) -> MLAConfig:
    num_heads, num_kv_heads = _head_counts(config)
    if num_kv_heads != num_heads:
        raise config.error("num_key_value_heads", f"must be {num_heads}: every head has a key")
    qk_nope_head_dim = config.size("qk_nope_head_dim")
    qk_rope_head_dim = _even(config, "qk_rope_head_dim")
    return MLAConfig(
        num_heads=num_heads,
        q_lora_rank=config.size_or_none("q_lora_rank", None),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim,
        v_head_dim=config.size("v_head_dim"),
        scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * read_latent_scale(config),
        attention_bias=has(options.qkv_bias, config),
        rope_interleave=has(options.interleaves_rope, config),
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


def read_eos_token_ids(config: ConfigFile, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the end-of-sequence tokens of `folder`: generation_config.json has the last word."""
    ids: tuple[int, ...] = ()
    generation_path = folder / GENERATION_CONFIG_NAME
    if generation_path.exists():
        ids = ConfigFile.read(generation_path).token_ids("eos_token_id", vocab_size)
    return tuple(sorted(set(ids or config.token_ids("eos_token_id", vocab_size))))
