"""Checkpoints as they are published: names, wrappers and layers that a decoder alone has not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner import official_layouts
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models


def run(folder: Path, tokens: list[int]) -> torch.Tensor:
    running = Sequences(ModelRunner(folder, "float32", "cpu"), 1, 40)
    return torch.cat([running.forward({0: tokens[:31]}), running.forward({0: tokens[31:40]})])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Small random experts amplify rounding."""
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_deepseek_v3_with_the_layer_that_predicts_a_second_token(
    models: Models, tokens: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published, plain = official_layouts.deepseek_v3(models, tmp_path)
    with caplog.at_level(logging.INFO):
        got = run(published, tokens)
    [line] = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert "behind the 2 of the model" in line
    assert_close(got, models.logits_of(plain, tokens[:40]))


def test_kimi_k2(models: Models, tokens: list[int], tmp_path: Path) -> None:
    published = official_layouts.kimi_k2(models, tmp_path)
    assert_close(run(published, tokens), models.logits("kimi-k2", tokens[:40]))


def test_gpt_oss_with_experts_in_blocks(models: Models, tokens: list[int], tmp_path: Path) -> None:
    published, plain = official_layouts.gpt_oss(models, tmp_path)
    assert_close(run(published, tokens), models.logits_of(plain, tokens[:40]))


@pytest.mark.parametrize(
    ("name", "write"),
    [("gemma3-4b", official_layouts.gemma3), ("mistral", official_layouts.mistral_small_3)],
)
def test_a_decoder_in_a_model_for_images(
    name: str,
    write: Callable[[Models, Path], Path],
    models: Models,
    tokens: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        got = run(write(models, tmp_path), tokens)
    [line] = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert line.startswith("3 tensors are left out")
    assert line.endswith("multi_modal_projector, vision_tower")
    assert_close(got, models.logits(name, tokens[:40]))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "llava"])
def test_text_of_a_model_for_images_as_transformers_saves_it(
    name: str, models: Models, tokens: list[int]
) -> None:
    assert_close(run(models.folder(name), tokens), models.logits(name, tokens[:40]))


@pytest.mark.parametrize(
    "write",
    [official_layouts.qwen2_5_vl, official_layouts.qwen2_5_vl_saved_before_transformers_5],
)
def test_qwen2_5_vl(
    write: Callable[[Models, Path], Path], models: Models, tokens: list[int], tmp_path: Path
) -> None:
    assert_close(run(write(models, tmp_path), tokens), models.logits("qwen2.5-vl", tokens[:40]))


def test_a_head_that_differs_from_embeddings_said_to_be_tied(
    models: Models, tokens: list[int], tmp_path: Path
) -> None:
    """Transformers does not tie them either."""

    def tie(before: dict[str, Any]) -> dict[str, Any]:
        return {**before, "tie_word_embeddings": True}

    folder = official_layouts.rewrite(models.folder("llama"), tmp_path / "tied", tie, dict)
    assert_close(run(folder, tokens), models.logits("llama", tokens[:40]))


def test_a_stored_head_that_is_the_embeddings(models: Models, tmp_path: Path) -> None:
    def store_head(tensors: official_layouts.Tensors) -> official_layouts.Tensors:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    tied = models.folder("llama-tied")
    folder = official_layouts.rewrite(tied, tmp_path / "stored", dict, store_head)
    digests = [ModelRunner(one, "float32", "cpu").weights_digest for one in (tied, folder)]
    assert digests[0] == digests[1]
