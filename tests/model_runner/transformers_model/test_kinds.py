"""Every kind of model that transformers has is served as its own forward, or refused with words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.model_runner.transformers_model.kinds import SAME, all_kinds, find, read_results

OFTEN = (
    "gpt2",  # products of another class, learnt positions
    "phi",  # partly rotated heads
    "cohere2",  # windows, layers without positions
    "gpt_oss",  # sinks, windows, experts with biases
    "gemma4_text",  # pools of two geometries, layers that share keys
    "mimo_v2_flash",  # keys and values of unlike width
    "glm4_moe_lite",  # latents, experts
    "mamba2",
    "bloom",
    "deepseek_v32",
    "llama4_text",
    "roberta",
)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in all_kinds()],
)
def test_kind(kind: str, tmp_path: Path) -> None:
    found, expected = find(kind, tmp_path), read_results()[kind]
    assert replace(found, difference=0.0) == replace(expected, difference=0.0)
    assert found.difference < SAME


def test_most_kinds_are_served() -> None:
    """MiniMax M3 is one of 94 but for the sparse layers that its published models have."""
    results = read_results()
    assert results.keys() == all_kinds().keys()
    assert "stores more than keys" in results["minimax_m3_vl_text"].refusal
    assert 1 + sum(not one.refusal for one in results.values()) >= 94
