"""What a config.json may say, and the one line that says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.model_config import ModelConfig
from kvrelay.model_runner.rope import Llama3Rope, PlainRope, YarnRope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
}


def read(folder: Path, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return ModelConfig.from_checkpoint(folder)


def test_fields_and_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_model_len, config.vocab_size) == (16, 128, 131)
    assert config.rope == PlainRope(10_000.0)
    assert not config.tie_word_embeddings
    assert not config.qkv_bias
    assert config.eos_token_ids == (7,)


def test_generation_config_names_the_ends(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert read(tmp_path).eos_token_ids == (3, 9)


def test_generation_config_without_ends_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, eos_token_id=[1, 2]).eos_token_ids == (1, 2)


def test_rope_as_written_before_transformers_5(tmp_path: Path) -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 32
    config = read(tmp_path, rope_theta=500000.0, rope_scaling=scaling)
    assert config.rope == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 32)


def test_yarn_infers_factor_and_attention_factor(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = read(tmp_path, rope_parameters=rope)
    assert isinstance(config.rope, YarnRope)
    assert config.rope.factor == 4.0
    assert config.rope.attention_factor == pytest.approx(1.1386294)


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_window_that_is_never_felt_is_accepted(tmp_path: Path, window: int | None) -> None:
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=window)


def test_absent_window_of_a_mistral_is_transformers_default(tmp_path: Path) -> None:
    assert MistralConfig.from_dict({}).sliding_window == 4096
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, **mistral, max_position_embeddings=4096).max_model_len == 4096
    with pytest.raises(CheckpointError, match=r"sliding_window \(absent, so 4096; null would be"):
        read(tmp_path, **mistral, max_position_embeddings=4097)


def test_end_in_generation_config_outside_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 131]}')
    with pytest.raises(CheckpointError) as refusal:
        read(tmp_path)
    assert str(refusal.value) == f"{path}: eos_token_id of 131 is outside the vocabulary of 131"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": 131}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "rope_parameters.high_freq_factor",
        ),
    ],
)
def test_refusal_names_file_and_field(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(tmp_path, **changes)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}: {field} ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "file not found"), ("{", "not readable as JSON"), ("[]", "must hold a JSON object")],
)
def test_unreadable_file(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        ModelConfig.from_checkpoint(tmp_path)
