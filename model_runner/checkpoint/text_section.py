"""The part of config.json that describes a decoder: all, or a section of a model for images."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.model_runner.checkpoint.architectures import ARCHITECTURES
from kvrelay.model_runner.checkpoint.config_file import ConfigFile
from kvrelay.model_runner.errors import NotNativeError


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model for images whose decoder computes text as if it were alone."""

    text_type: str
    """The `model_type` of a `text_config` that names none."""
    ties: bool = False
    """The meaning of a `tie_word_embeddings` that is left out."""
    section_may_tie: bool = False
    """Whether `text_config` may tie embeddings, too."""
    may_be_flat: bool = False
    """Whether config.json may have the fields of `text_config` without it."""


WRAPPERS: Final[Mapping[str, ImageModel]] = {
    "Gemma3ForConditionalGeneration": ImageModel("gemma3_text", ties=True),
    "Mistral3ForConditionalGeneration": ImageModel("mistral", ties=True),
    "LlavaForConditionalGeneration": ImageModel("llama", section_may_tie=True),
    "Qwen2_5_VLForConditionalGeneration": ImageModel(
        "qwen2_5_vl_text", section_may_tie=True, may_be_flat=True
    ),
    "Qwen3VLForConditionalGeneration": ImageModel("qwen3_vl_text"),
}
"""The models for images that are served, by transformers' names of them."""

_SECTION_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
    },
    "qwen2_5_vl_text": {
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "eos_token_id": 151_645,
    },
    "qwen3_vl_text": {
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 151_936,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
    },
}
"""Fields that a `text_config` may leave out, by `model_type`; no other decoder may."""


def find_architecture(config: ConfigFile) -> tuple[str, ConfigFile]:
    """The name of a config.json's architecture, and the section that describes the decoder.

    The section is complete: it has what transformers assumes where fields are left out.

    Raises:
        NotNativeError: no row of `ARCHITECTURES` has its name.
        CheckpointError: it names none.
    """
    name = _name(config)
    wrapper = WRAPPERS.get(name)
    if config.has("text_config"):
        if wrapper is None:
            raise _unknown(config, "architectures", name, WRAPPERS, "of those with a text_config ")
        return _read_section(config, wrapper)
    if wrapper is not None and wrapper.may_be_flat:
        return _complete(config, wrapper.text_type)
    if name not in ARCHITECTURES:
        raise _unknown(config, "architectures", name, ARCHITECTURES)
    return name, ARCHITECTURES[name].complete(config)


def _read_section(config: ConfigFile, wrapper: ImageModel) -> tuple[str, ConfigFile]:
    section = config.section("text_config")
    if config.has("quantization_config"):
        outer = {"quantization_config": config.get("quantization_config")}
        section = section.with_defaults(outer)
    if config.has("eos_token_id"):
        section = section.with_fields({"eos_token_id": config.get("eos_token_id")})
    name, text = _complete(section, section.text("model_type", wrapper.text_type))
    ties = config.flag("tie_word_embeddings", wrapper.ties)
    if wrapper.section_may_tie:
        ties = ties or text.flag("tie_word_embeddings", False)
    return name, text.with_fields({"tie_word_embeddings": ties})


def _complete(section: ConfigFile, model_type: str) -> tuple[str, ConfigFile]:
    """The architecture of a section by `model_type`: the one that it names may be the wrapper's."""
    name = _of_type(model_type)
    if name is None:
        raise _unknown(section, "model_type", model_type, ARCHITECTURES)
    defaults = _SECTION_DEFAULTS.get(model_type, {})
    return name, ARCHITECTURES[name].complete(section.with_defaults(defaults))


def _name(config: ConfigFile) -> str:
    """The architecture by `architectures`, or else by `model_type`."""
    names = config.get("architectures")
    if names is None and config.has("model_type"):
        model_type = config.text("model_type")
        return _of_type(model_type) or model_type
    if not isinstance(names, list) or len(names) != 1:
        raise config.error("architectures", f"must name one architecture, got {names!r}")
    return str(names[0])


def _of_type(model_type: str) -> str | None:
    rows = ARCHITECTURES.items()
    return next((name for name, options in rows if model_type in options.model_types), None)


def _unknown(
    config: ConfigFile, field: str, name: str, known: Collection[str], which: str = ""
) -> NotNativeError:
    problem = f"{name!r} is not supported ({which}these are: {', '.join(known)})"
    return config.not_native(field, problem)
