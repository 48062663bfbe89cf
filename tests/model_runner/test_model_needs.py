"""What config.json alone tells of a model's memory, beside the checkpoint that it belongs to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import PhiConfig, PhiForCausalLM, RobertaConfig

from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.model_needs import find_needs
from tests.model_runner.tiny_models import Models

NAMES = (
    "llama",
    "llama-tied",
    "llama-biased",
    "qwen2",
    "qwen3-window",
    "gemma2",
    "gemma3",
    "deepseek-v2",
    "deepseek-v3-experts",
    "youtu",
    "granite",
    "olmo2",
    "mixtral-experts",
    "qwen2-experts",
    "qwen3-experts",
    "glm4-experts",
    "minimax-experts",
    "gpt-oss-experts",
)


def count_stored(folder: Path) -> int:
    """The numbers of all tensors of a checkpoint."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            total += sum(file.get_tensor(name).numel() for name in names)
    return total


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_counted_as_they_are_stored(name: str, models: Models, tmp_path: Path) -> None:
    folder = models.folder(name)
    shutil.copy(folder / "config.json", tmp_path)
    needs = find_needs(tmp_path)
    assert needs.code is ModelCode.NATIVE
    assert needs.num_weights == count_stored(folder)
    assert needs.weight_bytes(4) == 4 * needs.num_weights


def test_a_window_keeps_its_last_tokens_alone(models: Models) -> None:
    """Three layers, of which two see 8 tokens; a token has 2 heads of 128 in 2 bytes, twice."""
    needs = find_needs(models.folder("qwen3-window"))
    a_token = 2 * 2 * 128 * 2
    assert needs.kv_bytes(5) == 3 * 5 * a_token
    assert needs.kv_bytes(100) == (100 + 2 * 8) * a_token


def test_latents_are_counted_once(models: Models) -> None:
    needs = find_needs(models.folder("deepseek-v2"))
    assert needs.kv_bytes(1) == 2 * (24 + 8) * 2


def test_a_model_of_transformers_code(tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config = PhiConfig(**shape, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "architectures": ["PhiForCausalLM"]})
    )
    needs = find_needs(tmp_path)
    assert needs.code is ModelCode.TRANSFORMERS
    assert needs.num_weights == sum(one.numel() for one in PhiForCausalLM(config).parameters())
    with pytest.raises(CheckpointError, match="PhiForCausalLM"):
        find_needs(tmp_path, ModelCode.NATIVE)


def test_code_that_would_be_refused_at_the_start_is_refused(tmp_path: Path) -> None:
    RobertaConfig(is_decoder=True, architectures=["RobertaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="numbers positions in a way of its own"):
        find_needs(tmp_path)
