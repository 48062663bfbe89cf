"""A check that FlashInfer's kernels can be compiled here, which happens at their first use.

The places are those where flashinfer.jit looks (0.7): `FLASHINFER_NVCC`, `CUDA_HOME`, `CUDA_PATH`,
`PATH` and /usr/local/cuda for nvcc, `PATH` alone for ninja, `CXX` for the linker.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

COMPILED_PACKAGE: Final = "flashinfer_jit_cache"
"""Kernels for all usual models, compiled by FlashInfer's makers; not on PyPI."""
LAZILY: Final = "-Wl,-z,lazy"
"""The linker's option against ``-z now``."""
_DEFAULT_HOME: Final = "/usr/local/cuda"
_LINK_OPTIONS: Final = "FLASHINFER_EXTRA_LDFLAGS"


def compiler_lacks(variables: Mapping[str, str] = os.environ) -> str | None:
    """The programs that are missing to compile kernels, in a few words.

    None if nothing is missing, or if the kernels are installed compiled.
    """
    if find_spec(COMPILED_PACKAGE) is not None:
        return None
    path = variables.get("PATH", os.defpath)
    found = {
        "nvcc (a CUDA toolkit; CUDA_HOME says where)": shutil.which(_nvcc(variables, path)),
        "ninja": shutil.which("ninja", path=f"{path}{os.pathsep}{_own_programs()}"),
        "C++ compiler (CXX says which)": shutil.which(variables.get("CXX", "c++"), path=path),
    }
    missing = [name for name, program in found.items() if program is None]
    return f"no {', no '.join(missing)}" if missing else None


def offer_own_ninja() -> None:
    """Let FlashInfer find the ninja that pip installed with it, by this process's `PATH`.

    A Python that is started by its path, as workers are, does not have its folder there.
    """
    if shutil.which("ninja") is None and shutil.which("ninja", path=_own_programs()):
        path = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = f"{path}{os.pathsep}{_own_programs()}"


def link_lazily(variables: MutableMapping[str, str] = os.environ) -> None:
    """Let FlashInfer link its modules so that names are resolved when they are first called.

    Modules of fa2 (0.7.2) name kernels that they do not have, and that nothing calls. Where a
    compiler links with ``-z now``, as Ubuntu's does, such a module could not be loaded.
    """
    given = variables.get(_LINK_OPTIONS, "")
    if LAZILY not in given.split():
        variables[_LINK_OPTIONS] = f"{LAZILY} {given}".rstrip()  # the user's are last, and win


def _nvcc(variables: Mapping[str, str], path: str) -> str:
    """The path of the nvcc that would be called, whether it exists or not."""
    if nvcc := variables.get("FLASHINFER_NVCC"):
        return shutil.which(nvcc, path=path) or nvcc
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if not home and (nvcc := shutil.which("nvcc", path=path)):
        return nvcc
    return str(Path(home or _DEFAULT_HOME) / "bin" / "nvcc")


def _own_programs() -> str:
    """The folder of this Python's programs."""
    return str(Path(sys.executable).parent)
