"""Compiled kernels are kept by the sources of all of them, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.cpu_kernels.jit import kernel
from kvrelay.cpu_kernels.kernel_cache import SOURCES, make_cache_folder
from tests.pairwise import few

NORM = """
import inspect
import numpy as np
from numba.core.codegen import JITCodeLibrary
made = []
make = JITCodeLibrary._finalize_specific
JITCodeLibrary._finalize_specific = lambda self: (made.append(self.name), make(self))
from kvrelay.cpu_kernels.elementwise_kernels import rms_norm
ones = np.ones(4, np.uint16)
out = ones.copy()
rms_norm(1, 1, 4, ones.ctypes.data, ones.ctypes.data, False, 1e-6, out.ctypes.data)
stats = rms_norm.stats
parts = [name for name in made if name.startswith("rms_norm_row")]
found = sum(stats.cache_hits.values())
print(inspect.getfile(rms_norm.py_func), stats.cache_path, found, len(parts))
"""
REPORT = """
from kvrelay.cpu_kernels.attention.decode_attention import attend_rows
from kvrelay.cpu_kernels.elementwise_kernels import rms_norm
from kvrelay.cpu_kernels.write_kv import write_kv
for kernel in rms_norm, write_kv, attend_rows:
    print(kernel.stats.cache_path)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the folder that kernels are compiled from, to be changed."""
    return shutil.copytree(SOURCES, tmp_path / "sources", ignore=shutil.ignore_patterns("__*__"))


def cache_paths(cache_home: str) -> list[str]:
    """Where a process that starts with this XDG_CACHE_HOME keeps three kernels."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache_home}
    run = subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


@pytest.mark.parametrize(
    "name", sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py"))
)
def test_a_change_of_any_source_is_another_cache(tmp_path: Path, sources: Path, name: str) -> None:
    before = make_cache_folder(tmp_path, sources)
    assert make_cache_folder(tmp_path, sources) == before == make_cache_folder(tmp_path)
    with (sources / name).open("a") as file:
        file.write("# changed")
    assert make_cache_folder(tmp_path, sources) != before


def test_a_new_source_is_another_cache(tmp_path: Path, sources: Path) -> None:
    before = make_cache_folder(tmp_path, sources)
    (sources / "more_kernels.py").touch()
    assert make_cache_folder(tmp_path, sources) != before


def test_a_kernel_outside_of_the_sources_is_refused() -> None:
    """A change of its file would not be noticed by the kernels it is compiled into."""

    def double(x: float) -> float:
        return 2 * x

    with pytest.raises(AssertionError, match="a kernel outside of cpu_kernels/"):
        kernel(double)


def compiled(python_path: str, cache_home: Path) -> tuple[str, Path, int, int]:
    """The file of a kernel that a process calls, where it is kept, and how often it was found.

    The last number counts its parts that became machine code of their own.
    """
    environment = {**os.environ, "PYTHONPATH": python_path, "XDG_CACHE_HOME": str(cache_home)}
    run = subprocess.run(
        [sys.executable, "-c", NORM], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    file, folder, found, parts = run.stdout.split()
    return file, Path(folder), int(found), int(parts)


def test_kernels_lie_below_the_users_cache_and_one_process_compiles_for_all(tmp_path: Path) -> None:
    """From another checkout, or from where the same code is installed, too."""
    folder, here = make_cache_folder(tmp_path), os.environ.get("PYTHONPATH", "")
    copy = tmp_path / "copy" / "kvrelay" / "cpu_kernels"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    places = [here, os.pathsep.join([str(tmp_path / "copy"), here])]
    with ThreadPoolExecutor() as threads:
        files, folders, found, parts = zip(
            *threads.map(lambda place: compiled(place, tmp_path), places), strict=True
        )
    assert folders == (folder, folder)
    assert sorted(found) == [0, 1]
    assert parts == (0, 0)
    assert [Path(file).is_relative_to(copy) for file in files] == [False, True]


@few(1)
@pytest.mark.parametrize("cache_home", ["/dev/null", "relative"])
def test_an_unusable_cache_is_done_without(cache_home: str) -> None:
    assert cache_paths(cache_home) == ["None"] * 3
