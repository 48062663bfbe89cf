from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from kvrelay.deploy.nodes.converted import MANIFEST, ConvertedModels, sha256_of


class Converter:
    """Writes two files; counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, source: Path, folder: Path, dtype: str) -> None:
        self.runs += 1
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def convert() -> Converter:
    return Converter()


@pytest.fixture
def converted(tmp_path: Path, convert: Converter) -> ConvertedModels:
    return ConvertedModels(tmp_path / "cache", convert)


def get(converted: ConvertedModels, source: Path, dtype: str = "bfloat16") -> Path:
    return converted.get("tiny", sha256_of(source), dtype, lambda: source, lambda text: None)


def no_source() -> Path:
    raise AssertionError("the source was asked for")


def test_a_model_is_converted_once(converted: ConvertedModels, convert: Converter, source: Path):
    folder = get(converted, source)
    assert folder.name == f"tiny-{sha256_of(source)[:16]}-bfloat16"
    assert get(converted, source) == folder
    assert convert.runs == 1
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"


def test_what_is_cached_needs_its_source_no_more(converted: ConvertedModels, source: Path):
    digest = sha256_of(source)
    folder = get(converted, source)
    source.unlink()
    assert converted.get("tiny", digest, "bfloat16", no_source, print) == folder


def test_another_source_or_dtype_is_another_checkpoint(converted: ConvertedModels, source: Path):
    folders = {get(converted, source), get(converted, source, "float32")}
    source.write_bytes(b"other weights")
    folders.add(get(converted, source))
    assert len(folders) == 3


def break_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weightsweighTs")


def lose_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def age_manifest(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 0}))


@pytest.mark.parametrize(
    "damage", [break_file, lose_file, lose_manifest, break_manifest, age_manifest]
)
def test_a_broken_folder_is_rebuilt(
    converted: ConvertedModels, convert: Converter, source: Path, damage
):
    folder = get(converted, source)
    damage(folder)
    assert get(converted, source) == folder
    assert convert.runs == 2
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, source: Path):
    def fail(source: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        get(ConvertedModels(tmp_path / "cache", fail), source)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def convert_slowly(cache: Path, source: Path, log: Path) -> None:
    def convert(source: Path, folder: Path, dtype: str) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(0.3)
        Converter()(source, folder, dtype)

    get(ConvertedModels(cache, convert), source)


def test_of_two_processes_one_converts_and_one_waits(tmp_path: Path, source: Path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "cache", source, log)
    processes = [context.Process(target=convert_slowly, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "converted\n"
