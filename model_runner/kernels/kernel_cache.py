"""Where compiled kernels are kept between runs.

::

    <the user's cache>/kvrelay/kernels/<digest of this folder's code and numba's version>/

numba by itself notices a change of the file that a kernel is in, but not of
another whose functions were compiled into it: hence the digest.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import numba

from kvrelay.options.user_cache import cache_home

SOURCES: Final = Path(__file__).resolve().parent
"""The folder of all code that kernels are compiled from; `jit` compiles no other file's."""


def is_kernel_source(path: Path) -> bool:
    """Whether a change of the file `path` is a change of `make_cache_folder`'s digest."""
    return path.resolve().parent == SOURCES and path.suffix == ".py"


@contextmanager
def kernel_cache() -> Iterator[bool]:
    """While a kernel is declared: whether it can be cached, and numba told where."""
    folder = _folder()
    if folder is None:
        yield False
        return
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield True
    finally:
        numba.config.CACHE_DIR = before


def make_cache_folder(home: Path, sources: Path = SOURCES) -> Path:
    """Make the folder below `home` for kernels compiled from the Python files in `sources`.

    Raises:
        OSError: it cannot be made or written to.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(sources.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    folder = home / "kvrelay" / "kernels" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


@cache
def _folder() -> Path | None:
    try:
        return make_cache_folder(cache_home())
    except (OSError, ValueError, RuntimeError):
        return None  # every process then compiles for itself
