"""Compiled kernels are kept by the sources of all of them, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.model_runner import kernel_cache
from kvrelay.model_runner.kernel_cache import SOURCES, make_cache_folder

REPORT = """
from kvrelay.model_runner.cpu_kernels import rms_norm
from kvrelay.model_runner.decode_kernel import make_decode_kernel
print(rms_norm._cache.cache_path, make_decode_kernel(2, 1, 1, 2, 2)._cache.cache_path)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in SOURCES:
        shutil.copy(Path(kernel_cache.__file__).with_name(name), folder)
    return folder


def cache_paths(cache_home: str) -> list[str]:
    """Where a process that starts with this XDG_CACHE_HOME keeps two kernels."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache_home}
    run = subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_of_any_source_is_another_cache(tmp_path: Path, sources: Path, name: str) -> None:
    before = make_cache_folder(tmp_path, sources)
    assert make_cache_folder(tmp_path, sources) == before
    with (sources / name).open("a") as file:
        file.write("# changed")
    assert make_cache_folder(tmp_path, sources) != before


def test_kernels_lie_below_the_users_cache(tmp_path: Path) -> None:
    folder = make_cache_folder(tmp_path, Path(kernel_cache.__file__).parent)
    paths = cache_paths(str(tmp_path))
    assert [Path(path).parent for path in paths] == [folder, folder]


@pytest.mark.parametrize("cache_home", ["/dev/null", "relative"])
def test_an_unusable_cache_is_done_without(cache_home: str) -> None:
    assert cache_paths(cache_home) == ["None", "None"]
