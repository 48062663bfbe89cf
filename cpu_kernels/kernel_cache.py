"""The folder of compiled kernels, which are kept between runs.

::

    <the user's cache>/kvrelay/kernels/<digest of this folder's code and numba's version>/

numba by itself notices a change of a kernel's own file, but not of other files whose functions were
compiled into the kernel. The digest covers these. numba also keeps compiled code by the path of the
file. With `KernelLocator` all checkouts and installations of the same code share it.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import numba

from kvrelay.options.user_cache import cache_home

SOURCES: Final = Path(__file__).resolve().parent
"""The room of all code that kernels are compiled from; `jit` compiles no other file's."""


def is_kernel_source(path: Path) -> bool:
    """Whether the digest of `make_cache_folder` covers the file `path`."""
    return SOURCES in path.resolve().parents and path.suffix == ".py"


@contextmanager
def kernel_cache() -> Iterator[bool]:
    """Tell numba the folder while a kernel is declared; yield whether the kernel can be cached."""
    folder = _folder()
    if folder is None:
        yield False
        return
    config = numba.config
    before = config.CACHE_DIR, getattr(config, "CACHE_LOCATOR_CLASSES", "")  # older ones have none
    config.CACHE_DIR = str(folder)
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelLocator.__name__}"
    try:
        yield True
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


class KernelLocator:
    """The locator that tells numba where to keep compiled functions of whatever file.

    It has the methods of numba's own locators.
    """

    def __init__(self, file: str, first_line: int) -> None:
        self._py_file = file  # numba names it where it warns that a kernel cannot be kept
        self._first_line = first_line
        self._folder = numba.config.CACHE_DIR

    @classmethod
    def from_function(cls, function: Any, file: str) -> Self:
        """Make the locator of one function."""
        return cls(file, function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        """Make the folder again if it was removed."""
        Path(self._folder).mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        """The folder of all kernels."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """The stamp that must be equal; empty, as the folder is named after all of the code."""
        return ""

    def get_disambiguator(self) -> str:
        """The mark that tells functions of one name in one file apart."""
        return str(self._first_line)


def make_cache_folder(home: Path, sources: Path = SOURCES) -> Path:
    """Make the folder below `home` for kernels compiled from the Python files below `sources`.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.relative_to(sources).as_posix().encode())
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
