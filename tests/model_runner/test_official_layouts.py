"""Checkpoints as they are published: names, wrappers and layers that a decoder alone has not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

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
