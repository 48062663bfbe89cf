"""What a checkpoint says about its model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvrelay.model_runner.config_file import ConfigFile
from kvrelay.model_runner.rope import Rope, parse_rope

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
_MISTRAL_WINDOW = 4096
"""What transformers takes for the `sliding_window` that a Mistral's config.json leaves out."""


class Architecture(StrEnum):
    """The dense decoders that `Decoder` runs. They differ in biases and norms only."""

    LLAMA = "LlamaForCausalLM"
    """Biases by `attention_bias` and `mlp_bias`."""
    MISTRAL = "MistralForCausalLM"
    """No biases; some have a sliding window (refused if it would be felt)."""
    QWEN2 = "Qwen2ForCausalLM"
    """Biases on queries, keys and values, always."""
    QWEN3 = "Qwen3ForCausalLM"
    """Each head's query and key is normalized; biases by `attention_bias`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder's shape and constants."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_model_len: int
    """Tokens of a sequence, prompt and output: `max_position_embeddings`."""
    eos_token_ids: tuple[int, ...]
    """Ascending; those of generation_config.json where it names any, else of config.json."""

    @classmethod
    def from_checkpoint(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json (and generation_config.json where there is one).

        Raises `CheckpointError`, one line that names file and field, for
        anything missing, invalid, or not computed exactly by `Decoder`.
        """
        config = ConfigFile.read(folder / CONFIG_NAME)
        architecture = _architecture(config)
        _refuse_unsupported(config)
        max_model_len = config.size("max_position_embeddings")
        _refuse_sliding_window(config, architecture, max_model_len)
        num_heads, num_kv_heads, head_dim = _heads(config)
        vocab_size = config.size("vocab_size")
        by_config = architecture in (Architecture.LLAMA, Architecture.QWEN3)
        attention_bias = by_config and config.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            num_layers=config.size("num_hidden_layers"),
            hidden_size=config.size("hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=config.size("intermediate_size"),
            vocab_size=vocab_size,
            rms_norm_eps=config.number("rms_norm_eps"),
            rope=parse_rope(config, max_model_len),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or architecture is Architecture.QWEN2,
            attention_output_bias=attention_bias,
            mlp_bias=architecture is Architecture.LLAMA and config.flag("mlp_bias", False),
            qk_norm=architecture is Architecture.QWEN3,
            max_model_len=max_model_len,
            eos_token_ids=_eos_token_ids(config, folder / GENERATION_CONFIG_NAME, vocab_size),
        )


def _architecture(config: ConfigFile) -> Architecture:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.error("architectures", f"must name one architecture, got {names!r}")
    try:
        return Architecture(names[0])
    except ValueError:
        supported = ", ".join(Architecture)
        raise config.error(
            "architectures", f"{names[0]!r} is not supported (these are: {supported})"
        ) from None


def _refuse_unsupported(config: ConfigFile) -> None:
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set: quantized weights are not supported")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise config.error("hidden_act", f"must be 'silu', got {activation!r}")


def _refuse_sliding_window(
    config: ConfigFile, architecture: Architecture, max_model_len: int
) -> None:
    """A window no shorter than the context is never felt; a shorter one is not computed here."""
    if architecture is Architecture.MISTRAL and not config.is_null("sliding_window"):
        window = config.size("sliding_window", _MISTRAL_WINDOW)
        if window < max_model_len:
            absent = f"(absent, so {window}; null would be none)"
            raise config.error(
                "sliding_window",
                f"{f'of {window}' if config.has('sliding_window') else absent}"
                f" is shorter than max_position_embeddings of {max_model_len}:"
                " sliding windows are not supported",
            )
    if config.flag("use_sliding_window", False):
        raise config.error("use_sliding_window", "is true: sliding windows are not supported")


def _heads(config: ConfigFile) -> tuple[int, int, int]:
    """`num_heads, num_kv_heads, head_dim`."""
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"of {num_kv_heads} does not divide {num_heads} attention heads"
        )
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.error(
            "hidden_size", f"of {hidden_size} is no multiple of {num_heads} attention heads"
        )
    head_dim = config.size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even, got {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _eos_token_ids(config: ConfigFile, generation_path: Path, vocab_size: int) -> tuple[int, ...]:
    ids = config.token_ids("eos_token_id", vocab_size)
    if generation_path.exists():
        generation = ConfigFile.read(generation_path)
        ids = generation.token_ids("eos_token_id", vocab_size) or ids
    return tuple(sorted(set(ids)))
