"""Architectures that our code computes although transformers' could: both give the same logits."""

from __future__ import annotations

import pytest
import torch

from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models
from tests.model_runner.transformers_model.kinds import SAME
from tests.pairwise import few


@few(1)
@pytest.mark.parametrize("name", ["granite", "olmo2", "olmo3", "mixtral-experts", "qwen2-experts"])
def test_logits_are_those_by_transformers_code(
    name: str, models: Models, tokens: list[int]
) -> None:
    ours, theirs = (
        _logits(ModelRunner(models.folder(name), "float32", "cpu", model_code=code), tokens)
        for code in (ModelCode.NATIVE, ModelCode.TRANSFORMERS)
    )
    assert (ours - theirs).abs().max() < SAME * theirs.abs().max()


def _logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    running = Sequences(runner, 2, 60)
    first = running.forward({0: tokens[:30], 1: tokens[5:20]})
    return torch.cat((first, running.forward({0: tokens[30:50], 1: tokens[20:21]})))
