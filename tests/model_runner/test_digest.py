"""Models that differ in one byte have different digests; the same one has one, however stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.cpu_kernels.processor import describe_arithmetic
from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.worker.loading import load_model
from kvrelay.model_runner import runner
from kvrelay.model_runner.checkpoint.digest import tensor_digest
from kvrelay.model_runner.checkpoint.gguf_import import convert_gguf
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint
from tests.model_runner.sequences import Sequences

WEIGHTS = "model.safetensors"
SEVERAL_BLOCKS = 3 * (1 << 17) + 5
"""Elements of bfloat16: three blocks, then some words and some bytes."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("digest") / "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be changed."""
    return shutil.copytree(original, tmp_path / "checkpoint")


def digest_of(folder: Path, dtype: str = "float32", draft: Path | None = None) -> ModelDigest:
    """What a worker says of a checkpoint."""
    config = WorkerConfig(
        "p0",
        WorkerRole.PREFILL,
        folder,
        "tiny",
        dtype=dtype,
        kv_memory=1 << 20,
        draft_model_path=draft,
        speculation=Speculation.DRAFT if draft else Speculation.NONE,
    )
    return load_model(config, load_tokenizer(folder).sha256).digest


def flip_a_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def flip_the_last_weight(folder: Path) -> None:
    flip_a_bit(folder / WEIGHTS, -2)


def flip_a_weight_in_the_middle(folder: Path) -> None:
    flip_a_bit(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2 + 1)


def turn_otherwise(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rms_norm_eps"] = 2e-6
    path.write_text(json.dumps(config))


def add_a_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<s>", "<t>", 1) + "\n")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (flip_the_last_weight, "weights"),
        (flip_a_weight_in_the_middle, "weights"),
        (turn_otherwise, "config"),
        (add_a_token, "tokenizer"),
    ],
)
def test_a_changed_checkpoint_has_another_digest(
    original: Path, folder: Path, change: Callable[[Path], None], part: str
) -> None:
    before = digest_of(original)
    assert digest_of(folder) == before
    change(folder)
    after = digest_of(folder)
    assert after.name != before.name
    difference = after.difference_from(before)
    mine, theirs = (getattr(one, part)[:12] for one in (after, before))
    assert difference == f"{part} ({mine}, not {theirs})"


def test_what_changes_no_token_changes_no_digest(original: Path, folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))
    tensors = load_file(folder / WEIGHTS)
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / WEIGHTS).unlink()
    assert digest_of(folder) == digest_of(original)


def test_dtype_and_draft_belong_to_it(original: Path, folder: Path) -> None:
    plain, drafted = digest_of(original), digest_of(original, draft=folder)
    flip_the_last_weight(folder)
    other = digest_of(original, draft=folder)
    assert {plain.draft, drafted.draft, other.draft} - {""} == {drafted.draft, other.draft}
    assert drafted.difference_from(other).startswith("draft (")
    half = digest_of(original, "bfloat16")
    assert "dtype (bfloat16, not float32)" in half.difference_from(plain)
    assert half.weights != plain.weights


def test_where_bits_are_promised_a_processor_that_computes_otherwise_does_not_pair(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, loose = digest_of(original), digest_of(original, "bfloat16")
    monkeypatch.setattr(runner, "describe_arithmetic", lambda: "AVX1024")
    assert digest_of(original).difference_from(here) == (
        f"arithmetic (AVX1024, not {describe_arithmetic()})"
    )
    assert digest_of(original, "bfloat16") == loose
    assert PageHashes(digest_of(original), 16).root("") != PageHashes(here, 16).root("")


def test_who_writes_into_the_file_later_changes_no_loaded_weight(
    folder: Path, tokens: list[int]
) -> None:
    """The same file, not another one of its name: a copy onto it, or a disk that fails."""
    runner = ModelRunner(folder, "float32", "cpu")
    before = Sequences(runner, 1, 20).forward({0: tokens[:20]})
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(size // 8)
        file.write(b"\x40" * (size - size // 8))
    assert torch.equal(Sequences(runner, 1, 20).forward({0: tokens[:20]}), before)
    assert ModelRunner(folder, "float32", "cpu").weights_digest != runner.weights_digest


@pytest.mark.slow
def test_a_gguf_file_that_is_converted_twice_is_one_model(
    smollm2: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    convert_gguf(smollm2_gguf, tmp_path / "again", "bfloat16")
    first, again = (
        ModelRunner(folder, "bfloat16", "cpu") for folder in (smollm2, tmp_path / "again")
    )
    assert again.weights_digest == first.weights_digest
    assert again.config_digest == first.config_digest
    tokenizers = [load_tokenizer(folder).sha256 for folder in (smollm2, tmp_path / "again")]
    assert tokenizers[0] == tokenizers[1]


def test_every_byte_of_a_tensor_counts_and_its_place() -> None:
    tensor = torch.randn(SEVERAL_BLOCKS, dtype=torch.bfloat16)
    digests = {tensor_digest(tensor)}
    places = [0, 1, 2, 3, 1 << 17, SEVERAL_BLOCKS - 6, SEVERAL_BLOCKS - 5, SEVERAL_BLOCKS - 1]
    for place in places:
        changed = tensor.clone()
        changed.view(torch.int16)[place] ^= -(2**15)
        digests.add(tensor_digest(changed))
    swapped = tensor.clone()
    swapped[0], swapped[1 << 17] = tensor[1 << 17], tensor[0]
    negated = -tensor
    shaped = tensor[:-1].view(2, -1)
    others = [swapped, negated, tensor[:-1], shaped, tensor.view(torch.float16)]
    digests |= {tensor_digest(other) for other in others}
    assert len(digests) == 1 + len(places) + len(others)
    assert tensor_digest(tensor.clone()) == tensor_digest(tensor)


def test_a_digest_means_the_same_everywhere() -> None:
    """Written down, because workers of different machines compare theirs."""
    tensor = torch.arange(70_003, dtype=torch.float32).to(torch.bfloat16)
    assert tensor_digest(tensor).startswith("47e684230b478865")
    assert tensor_digest(torch.tensor(1.5)) != tensor_digest(torch.tensor([1.5]))
    assert tensor_digest(torch.ones(0)) != tensor_digest(torch.ones(0, 2))
