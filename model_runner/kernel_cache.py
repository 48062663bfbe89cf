"""Where compiled kernels are kept between runs.

::

    <the user's cache>/kvrelay/kernels/<digest of the kernels' sources and numba's version>/

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

from kvrelay.model_runner.user_cache import cache_home

SOURCES: Final = ("jit.py", "cpu_kernels.py", "decode_kernel.py")
"""Of this folder: all that kernels are made from."""


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


def make_cache_folder(home: Path, sources: Path) -> Path:
    """The folder below `home` for kernels made from `sources`; raises OSError if not writable."""
    digest = hashlib.sha256(numba.__version__.encode())
    for name in SOURCES:
        digest.update((sources / name).read_bytes())
    folder = home / "kvrelay" / "kernels" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


@cache
def _folder() -> Path | None:
    try:
        return make_cache_folder(cache_home(), Path(__file__).parent)
    except (OSError, ValueError, RuntimeError):
        return None  # every process then compiles for itself
