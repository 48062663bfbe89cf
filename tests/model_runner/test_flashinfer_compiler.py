"""Whether FlashInfer's kernels can be had is found out before a worker depends on them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from kvrelay.model_runner.attention import flashinfer_compiler
from kvrelay.model_runner.attention.flashinfer_compiler import compiler_lacks, offer_own_ninja


def add_program(path: Path) -> str:
    """A file that can be run; its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o755)
    return str(path.parent)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without programs, whose Python is in the folder `own`."""
    monkeypatch.setattr(flashinfer_compiler, "_DEFAULT_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(flashinfer_compiler, "COMPILED_PACKAGE", "no_such_package")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    return tmp_path


def test_everything_that_is_missing_is_named(bare: Path) -> None:
    lack = compiler_lacks({"PATH": str(bare)})
    assert lack is not None
    assert lack.startswith("no nvcc")
    assert "no ninja" in lack
    assert "no C++ compiler" in lack


@pytest.mark.parametrize("where", ["default", "PATH", "CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"])
@pytest.mark.parametrize("ninja", ["bin", "own"])
def test_programs_are_found_where_flashinfer_looks(bare: Path, where: str, ninja: str) -> None:
    path = [add_program(bare / ninja / "ninja"), add_program(bare / "bin" / "c++")][-1]
    variables = {"PATH": path}
    assert "no nvcc" in str(compiler_lacks(variables))
    home = bare / ("default" if where == "default" else "toolkit")
    folder = add_program(home / "bin" / "nvcc")
    match where:
        case "PATH":
            variables["PATH"] = f"{path}{os.pathsep}{folder}"
        case "FLASHINFER_NVCC":
            variables[where] = f"{folder}/nvcc"
        case "CUDA_HOME" | "CUDA_PATH":
            variables[where] = str(home)
    assert compiler_lacks(variables) is None


def test_a_home_that_is_named_counts_though_there_is_another_nvcc(bare: Path) -> None:
    for name in ("nvcc", "ninja", "c++"):
        add_program(bare / "bin" / name)
    lack = compiler_lacks({"PATH": str(bare / "bin"), "CUDA_HOME": str(bare / "gone")})
    assert lack is not None
    assert lack.startswith("no nvcc")
    assert "ninja" not in lack


def test_compiled_kernels_need_no_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_compiler, "COMPILED_PACKAGE", "numpy")
    assert compiler_lacks({"PATH": str(bare)}) is None


def test_ninja_beside_python_is_put_on_the_path(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(bare / "bin"))
    offer_own_ninja()
    assert os.environ["PATH"] == str(bare / "bin")
    add_program(bare / "own" / "ninja")
    offer_own_ninja()
    assert shutil.which("ninja") == str(bare / "own" / "ninja")
    offer_own_ninja()
    assert os.environ["PATH"].count("own") == 1
