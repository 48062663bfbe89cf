"""The folder of compiled kernels, which are kept between runs.

::

    <the user's cache>/kvrelay/kernels/<digest of this folder's code and numba's version>/

numba by itself notices a change of a kernel's own file, but not of other files whose functions were
compiled into the kernel. The digest covers these. numba also keeps compiled code by the path of the
file. With `KernelLocator` all checkouts and installations of the same code share it. Processes that
begin together would all compile the same. With `share_compilation` one of them does, for all.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Self

import numba
from numba.core.caching import FunctionCache

from kvrelay.options.user_cache import cache_home

LONGEST_WAIT_SECONDS: Final = 60.0
"""The wait for another process's compiling or timing; it may be stopped, and then never ends."""
_LOOK_SECONDS: Final = 0.02
SOURCES: Final = Path(__file__).resolve().parent
"""The room of all code that kernels are compiled from; `jit` compiles no other file's."""


def is_kernel_source(path: Path) -> bool:
    """Whether the digest of `make_cache_folder` covers the file `path`."""
    return SOURCES in path.resolve().parents and path.suffix == ".py"


@contextmanager
def kernel_cache() -> Iterator[bool]:
    """Tell numba the folder while a kernel is declared; yield whether the kernel can be cached."""
    folder = kernel_folder()
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


def share_compilation(dispatcher: Any) -> None:
    """Let one process compile a kernel while others wait for its files.

    To be called within `kernel_cache`, of a kernel that is cached.
    """
    shared = SharedCache(dispatcher.py_func)
    compile_it = dispatcher.compile

    def compile_alone(signature: Any) -> Any:
        try:
            return compile_it(signature)
        finally:
            shared.unlock()

    dispatcher._cache, dispatcher.compile = shared, compile_alone


def wait_for_turn(file: IO[str]) -> None:
    """Lock a file until it is closed; without its lock go on after `LONGEST_WAIT_SECONDS`.

    Raises:
        OSError: the file system has no locks.
    """
    give_up_at = time.monotonic() + LONGEST_WAIT_SECONDS
    while time.monotonic() < give_up_at:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)
        else:
            return


class SharedCache(FunctionCache):  # type: ignore[misc]
    """The files of one compiled function. Whoever does not find one is the next to make it.

    numba calls it under a lock of the process. Nothing that is compiled calls itself, so processes
    that wait for each other's functions never do so in a circle.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        code = function.__code__
        # Two files may have functions of one name in one line; a process holds both at once.
        name = f"{Path(code.co_filename).stem}.{code.co_name}-{code.co_firstlineno}.lock"
        self._path = Path(numba.config.CACHE_DIR) / name
        self._held: IO[str] | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function, or None, and then no other process compiles it."""
        found = super().load_overload(sig, target_context)
        if found is None and self._held is None:
            self._lock()
            found = super().load_overload(sig, target_context)
        return found

    def unlock(self) -> None:
        """Let others compile the function, if none has done so."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _lock(self) -> None:
        with suppress(OSError):  # no place for the file: each process compiles for itself
            self._held = self._path.open("w")
            wait_for_turn(self._held)


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
def kernel_folder() -> Path | None:
    """The folder of this user's compiled kernels; None: nothing can be kept."""
    try:
        return make_cache_folder(cache_home())
    except (OSError, ValueError, RuntimeError):
        return None  # every process then compiles for itself
