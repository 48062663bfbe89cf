"""Tokens of a batch that only the device knows are those that the step before has sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrelay.model_runner.batch import PendingIds
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_pending_tokens_are_taken_from_where_they_were_sampled(
    name: str, models: Models, tokens: list[int]
) -> None:
    """Beside tokens that the host knows, and in another order than they were sampled in."""
    runner = ModelRunner(models.folder(name), "float32", "cpu")
    running = Sequences(runner, 3, 40)
    running.forward({0: tokens[:9], 1: tokens[:4]})
    known = running.batch({0: tokens[9:10], 2: tokens[:6], 1: tokens[4:5]})
    expected = runner.forward(known)
    unknown = known.input_ids.copy()
    unknown[[0, 7]] = -1
    sampled = torch.tensor([tokens[4], 3, tokens[9]])
    pending = PendingIds(np.array([0, 7]), np.array([2, 0]), sampled)
    got = runner.launch(replace(known, input_ids=unknown, pending=pending))
    assert torch.equal(got, expected)
    assert sampled.tolist() == [tokens[4], 3, tokens[9]]
