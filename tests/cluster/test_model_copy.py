"""A model comes to a node through Ray in pieces, once, and is what it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.deploy.errors import ClusterError, ModelError
from kvrelay.deploy.nodes import model_copy
from kvrelay.deploy.nodes.model_copy import Files, files_of, local_copy, offering

ELSEWHERE = Path("/on/another/machine/tiny")


@pytest.fixture
def files(tiny: Path) -> Files:
    return files_of(tiny)


def test_a_checkpoint_is_its_configuration_weights_and_tokenizer(files: Files):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)


def test_who_has_the_model_copies_nothing(tiny: Path, files: Files, tmp_path: Path):
    assert local_copy(tiny, files, tmp_path / "cache") == tiny
    assert not (tmp_path / "cache").exists()


def test_workers_of_a_node_have_one_copy(
    ray: None, tiny: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetches = []
    fetch = model_copy._fetch

    def counted(folder: Path, digest: str, files: Files) -> None:
        fetches.append(folder)
        fetch(folder, digest, files)

    monkeypatch.setattr(model_copy, "_fetch", counted)
    with offering((tiny, files)), ThreadPoolExecutor() as pool:
        copies = list(pool.map(lambda _: local_copy(ELSEWHERE, files, tmp_path), range(3)))
    assert len(fetches) == 1
    assert set(copies) == {fetches[0]}
    for name in files:
        assert (copies[0] / name).read_bytes() == (tiny / name).read_bytes()
    assert local_copy(ELSEWHERE, files, tmp_path) == copies[0], "it is there without anybody"


def test_a_copy_that_was_changed_is_made_again(ray: None, tiny: Path, files: Files, tmp_path: Path):
    with offering((tiny, files)):
        copy = local_copy(ELSEWHERE, files, tmp_path)
        (copy / "config.json").write_text("{}")
        assert local_copy(ELSEWHERE, files, tmp_path) == copy
    assert (copy / "config.json").read_bytes() == (tiny / "config.json").read_bytes()


def test_a_source_that_has_changed_is_refused(ray: None, tiny: Path, files: Files, tmp_path: Path):
    other = {**files, "config.json": "0" * 64}
    with offering((tiny, other)), pytest.raises(ModelError, match=r"config\.json has changed"):
        local_copy(ELSEWHERE, other, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_without_a_source_it_is_said(ray: None, files: Files, tmp_path: Path):
    with pytest.raises(ModelError, match="nobody offers"):
        local_copy(ELSEWHERE, files, tmp_path)


def test_a_clusters_name_that_is_taken_is_said(ray: None, tiny: Path, files: Files):
    with (
        offering((tiny, files)),
        pytest.raises(ClusterError, match=r"^--cluster-name: .* runs in this Ray already$"),
        offering((tiny, files)),
    ):
        pass
