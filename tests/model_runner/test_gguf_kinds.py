"""The architectures of GGUF: each is the model that it was written from, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvrelay.model_runner.checkpoint.gguf_fields import complete_config
from kvrelay.model_runner.checkpoint.gguf_import import convert_gguf
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.transformers_model.self_proof import plain_logits
from tests.model_runner.gguf_files import KINDS, save_gguf
from tests.model_runner.sequences import Sequences
from tests.pairwise import few

TEXT = [5 + 7 * index % 500 for index in range(40)]


@few(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    model = save_gguf(name, tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    running = Sequences(ModelRunner(tmp_path / "out", "float32", "cpu"), 1, len(TEXT))
    expected = plain_logits(model, TEXT)
    got = running.forward({0: TEXT})
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@few(1)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.type is yarn"),
        ({"attention.scale": 0.3}, "attention.scale is 0.3"),
        ({"rope.scaling.attn_factor": 1.25}, "rope.scaling.attn_factor is 1.25"),
        ({"rope.freq_base_swa": 300.0}, "rope.freq_base_swa is 300.0"),
        ({"attention.key_length": 24}, "rope.dimension_count is 16"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_field_that_the_reader_leaves_out_is_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_gguf("llama", tmp_path / "model.gguf", fields)
    with pytest.raises(CheckpointError, match=rf"llama\.{said}"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_a_tensor_that_the_reader_leaves_out_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    save_gguf("llama", tmp_path / "model.gguf", tensors=extra)
    with pytest.raises(CheckpointError, match=r"leaves out \['blk.0.attn_sinks.weight'\]"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_a_stretched_rotation_is_taken_over(tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    save_gguf("qwen2", tmp_path / "model.gguf", fields)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_the_rotation_of_llama_3_is_found_by_its_factors() -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {"head_dim": 64, "max_position_embeddings": 131_072}
    config: Any = LlamaConfig(**shape)
    target: Any = LlamaConfig(**shape)
    config.rope_parameters["rope_theta"] = 500_000.0
    target.rope_parameters = scaled
    frequencies = [LlamaRotaryEmbedding(one).inv_freq.numpy() for one in (config, target)]
    factors = frequencies[0] / frequencies[1]
    metadata = {"general.architecture": "llama", "llama.rope.freq_base": 500_000.0}
    complete_config(Path("model.gguf"), metadata, {}, factors, config)
    assert config.rope_parameters == scaled
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is of no rotation"):
        complete_config(Path("model.gguf"), metadata, {}, factors * 1.01, config)


def test_what_is_no_decoder_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "t5")
    writer.add_context_length(64)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    with pytest.raises(CheckpointError, match="t5 is no causal language model"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
