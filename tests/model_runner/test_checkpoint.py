"""Weights from one file or from shards; whatever is wrong is named in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.model_runner.errors import CheckpointError, UnsupportedOptionError
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import Models

NORM = "model.layers.1.input_layernorm.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be broken."""
    return shutil.copytree(models.folder("llama"), tmp_path / "checkpoint")


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace or (with None) remove tensors of a single-file checkpoint."""
    tensors = {**load_file(folder / SINGLE), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / SINGLE)


def shard(folder: Path) -> None:
    """Split a single-file checkpoint in two."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    (folder / SINGLE).unlink()


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        ModelRunner(folder, "float32", "cpu")
    assert "\n" not in str(refusal.value)
    for part in (str(folder), *parts):
        assert part in str(refusal.value)


def test_shards_give_the_same_model(folder: Path, models: Models, tokens: list[int]) -> None:
    whole = Sequences(ModelRunner(folder, "float32", "cpu"), 1, 20).forward({0: tokens[:20]})
    shard(folder)
    parts = Sequences(ModelRunner(folder, "float32", "cpu"), 1, 20).forward({0: tokens[:20]})
    assert torch.equal(whole, parts)


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, {NORM: None})
    assert_refused(folder, f"tensor {NORM} is missing")


def test_wrong_shape(folder: Path) -> None:
    rewrite(folder, {NORM: torch.ones(65)})
    assert_refused(folder, NORM, "has shape [65], expected [64]")


def test_integer_tensor(folder: Path) -> None:
    rewrite(folder, {NORM: torch.ones(64, dtype=torch.int8)})
    assert_refused(folder, NORM, "not floating point")


def test_tensor_that_the_architecture_has_no_place_for(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, {name: torch.ones(64)})
    assert_refused(folder, name, "no place")


def test_two_tensors_for_one_place(folder: Path) -> None:
    wrapped = f"language_model.{NORM}"
    rewrite(folder, {wrapped: torch.ones(64)})
    assert_refused(folder, NORM, wrapped, "have one place")


BEHIND = "model.layers.2.input_layernorm.weight"


def test_more_layers_than_the_configuration_says(folder: Path) -> None:
    rewrite(folder, {BEHIND: torch.ones(64)})
    assert_refused(folder, f"tensor {BEHIND} has no place")


def test_a_layer_that_predicts_a_second_token_counts_for_nothing(
    folder: Path, models: Models, tokens: list[int]
) -> None:
    rewrite(folder, {BEHIND: torch.ones(64), "model.layers.2.eh_proj.weight": torch.ones(64, 128)})
    got = Sequences(ModelRunner(folder, "float32", "cpu"), 1, 9).forward({0: tokens[:9]})
    plain = ModelRunner(models.folder("llama"), "float32", "cpu")
    assert torch.equal(got, Sequences(plain, 1, 9).forward({0: tokens[:9]}))
    assert ModelRunner(folder, "float32", "cpu").weights_digest == plain.weights_digest


def test_stored_frequencies_are_ignored(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    ModelRunner(folder, "float32", "cpu")


def test_untied_head_missing(folder: Path) -> None:
    rewrite(folder, {"lm_head.weight": None})
    assert_refused(folder, "lm_head.weight is missing")


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_truncated_file(folder: Path, size: int) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:size])
    assert_refused(folder, SINGLE, "not readable")


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert_refused(folder, SINGLE, INDEX)


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "part-1.safetensors").unlink()
    assert_refused(folder, "part-1.safetensors", "file not found")


def test_a_shard_that_cannot_be_opened_is_not_called_missing(folder: Path) -> None:
    shard(folder)
    name = "part-1.safetensors"
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert_refused(folder, name, "not readable", "symbolic links")


def test_index_that_is_wrong_about_a_shard(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    others = {
        "part-0.safetensors": "part-1.safetensors",
        "part-1.safetensors": "part-0.safetensors",
    }
    index["weight_map"][NORM] = others[index["weight_map"][NORM]]
    (folder / INDEX).write_text(json.dumps(index))
    assert_refused(folder, f"tensor {NORM} is missing")


@pytest.mark.parametrize("file", ["../model.safetensors", 3])
def test_index_that_names_no_file_of_the_folder(folder: Path, file: object) -> None:
    shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: file}}))
    assert_refused(folder, INDEX, f"weight_map.{NORM}")


def test_empty_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("{}")
    assert_refused(folder, INDEX, "weight_map")


@pytest.mark.parametrize("dtype", ["int8", "", "bf16"])
def test_unknown_dtype(folder: Path, dtype: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="dtype"):
        ModelRunner(folder, dtype, "cpu")


@pytest.mark.parametrize("device", ["tpu", "meta", "", "cuda:99"])
def test_unknown_device(folder: Path, device: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="device"):
        ModelRunner(folder, "float32", device)
