"""Whether FlashInfer's kernels can be had is found out before a worker depends on them."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.model_runner.attention import flashinfer_compiler
from kvrelay.model_runner.attention.flashinfer_compiler import (
    compiler_lacks,
    link_lazily,
    offer_own_ninja,
)


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


def loads(library: Path) -> bool:
    """Whether the library loads as tvm-ffi, by which FlashInfer loads its modules, loads it."""
    open_library = ctypes.CDLL(None).dlopen
    open_library.restype = ctypes.c_void_p
    return open_library(str(library).encode(), os.RTLD_LAZY | os.RTLD_LOCAL) is not None


def test_a_module_with_a_name_that_nothing_has_loads(tmp_path: Path) -> None:
    """Also where the compiler links with `-z now` unless it is told otherwise."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "module.cpp", tmp_path / "module.so"
    source.write_text("void nobody_has_it();\nvoid call() { nobody_has_it(); }\n")
    variables = {"FLASHINFER_EXTRA_LDFLAGS": "-Wl,--as-needed"}
    found = {}
    for lazily in (False, True):
        if lazily:
            link_lazily(variables)
            link_lazily(variables)  # of a target, then of its draft model
        options = shlex.split(variables["FLASHINFER_EXTRA_LDFLAGS"])
        command = [compiler, "-shared", "-fPIC", "-Wl,-z,now", "-o", str(library), str(source)]
        subprocess.run(command + options, check=True)
        found[lazily] = loads(library)
    assert found == {False: False, True: True}
    assert variables["FLASHINFER_EXTRA_LDFLAGS"] == "-Wl,-z,lazy -Wl,--as-needed"


def test_a_user_who_wants_no_lazy_modules_gets_none() -> None:
    variables = {"FLASHINFER_EXTRA_LDFLAGS": "-Wl,-z,now"}
    link_lazily(variables)
    assert variables["FLASHINFER_EXTRA_LDFLAGS"] == "-Wl,-z,lazy -Wl,-z,now", "the last one wins"
