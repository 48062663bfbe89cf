"""A converted GGUF file is an ordinary checkpoint; a broken one leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging

from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.checkpoint.gguf_import import convert_gguf
from kvrelay.model_runner.errors import CheckpointError, DependencyError
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.sequences import Sequences


def test_tokenizer_and_ends(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    described = json.loads((smollm2 / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in described["chat_template"]
    assert described["eos_token"] == "<|im_end|>"
    assert read_config(smollm2).eos_token_ids == (2,)


def test_transformers_reads_the_same_model(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    reference, notes = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, output_loading_info=True
    )
    assert not notes["missing_keys"]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    got = Sequences(ModelRunner(smollm2, "float32", "cpu"), 1, 12).forward({0: ids})
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_corrupt_file_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.gguf: not readable as GGUF") as refusal:
        convert_gguf(source, tmp_path / "out")
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [source]


def test_truncated_file_leaves_nothing(tmp_path: Path, smollm2_gguf: Path) -> None:
    source = tmp_path / "short.gguf"
    with smollm2_gguf.open("rb") as whole:
        source.write_bytes(whole.read(200_000))
    with pytest.raises(CheckpointError, match="not readable as GGUF"):
        convert_gguf(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.slow
def test_nothing_is_drawn_on_the_terminal(
    tmp_path: Path, smollm2_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bars = (modeling_gguf_pytorch_utils.tqdm, logging.tqdm)
    convert_gguf(smollm2_gguf, tmp_path / "out")
    assert capfd.readouterr().err == ""
    assert (modeling_gguf_pytorch_utils.tqdm, logging.tqdm) == bars


def test_another_transformers_is_blamed_by_its_version(
    tmp_path: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_gguf_checkpoint(path: str, *, device: str) -> None:
        raise AssertionError

    monkeypatch.setattr(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load_gguf_checkpoint)
    with pytest.raises(DependencyError, match=rf"^transformers {transformers.__version__} reads"):
        convert_gguf(smollm2_gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="file not found"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_folder_in_use_is_not_overwritten(tmp_path: Path, smollm2_gguf: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(FileExistsError):
        convert_gguf(smollm2_gguf, tmp_path)
