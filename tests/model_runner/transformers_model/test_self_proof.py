"""A model that would be served wrong does not start, and one line says what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.transformers_model import (
    attention_interface,
    configuration,
    layout,
    own_parts,
    rope_lengths,
    self_proof,
)
from kvrelay.model_runner.transformers_model.described_mask import (
    DescribedMask,
    Unbounded,
    find_window,
)
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder
from tests.model_runner.transformers_model.kinds import compare, save_small, serve

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [9.0] * 48,
    "original_max_position_embeddings": 4096,
}
_NO_TUNING = {"attn_temperature_tuning": False}


def _see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_window", lambda mask, longest: None)


def _leave_softcaps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = attention_interface.Scoring
    monkeypatch.setattr(
        attention_interface, "Scoring", lambda scale, softcap, *rest: make(scale, None, *rest)
    )


def _follow_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_lengths, "steady_length", lambda config: None)
    monkeypatch.setattr(configuration, "steady_length", lambda config: None)


def _give_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformersDecoder.forward

    def roll(self: Any, batch: Any, backends: Any) -> torch.Tensor:
        logits = forward(self, batch, backends)
        return logits if len(logits) == len(batch.input_ids) else logits.roll(1, 0)

    monkeypatch.setattr(TransformersDecoder, "forward", roll)


def _clamp_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = own_parts.OwnGatedProduct.forward
    monkeypatch.setattr(
        own_parts.OwnGatedProduct, "forward", lambda self, x: forward(self, x).clamp(max=0.5)
    )


@pytest.mark.parametrize(
    ("plant", "kind", "changes", "words"),
    [
        (_see_all, "starcoder2", {"sliding_window": 4096}, "one whole sequence"),
        (_see_all, "llama4_text", _NO_TUNING, "one whole sequence"),
        (_leave_softcaps_out, "gemma2", {"attn_logit_softcapping": 0.5}, "one whole sequence"),
        (_follow_the_longest, "phi3", {"rope_parameters": _LONGROPE}, "change each other"),
        (_give_other_rows, "phi", {}, "its logits of some rows"),
        (_clamp_gates, "olmo", {}, "parts of ours"),
    ],
    ids=["window", "chunk", "softcap", "rope", "rows", "parts"],
)
def test_planted_fault_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save_small(kind, tmp_path, **changes)
    assert compare(serve(tmp_path), model) < 1e-4
    plant(monkeypatch)
    with pytest.raises(CheckpointError, match=words):
        serve(tmp_path)


def test_loaded_weights_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small("phi", tmp_path)
    install = own_parts.install_parts

    def install_another(model: nn.Module, *parts: Any) -> None:
        for weight in model.parameters():
            if weight.dtype is torch.bfloat16:  # the small model is in float32
                weight.mul_(1.3)
        install(model, *parts)

    monkeypatch.setattr(self_proof, "install_parts", install_another)
    with pytest.raises(CheckpointError, match="with the loaded weights"):
        serve(tmp_path, "bfloat16")


def test_longest_sequence_of_a_rope_that_follows_the_length(tmp_path: Path) -> None:
    save_small("phi3", tmp_path, rope_parameters=_LONGROPE)
    assert serve(tmp_path).max_model_len == 16


@pytest.mark.parametrize(
    ("allows", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 300), 300),
        (lambda b, h, q, k: (k <= q) & (k > q - 1000), None),
        (lambda b, h, q, k: (k <= q) & (k // 300 == q // 300), Unbounded.ASK),
        (lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 300)), Unbounded.ASK),
    ],
)
def test_windows_of_masks(allows: Callable[..., torch.Tensor], window: object) -> None:
    assert find_window(DescribedMask(allows), 1000) == window
