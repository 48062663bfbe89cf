"""Settings of the C library for memory that a process frees.

By default, glibc keeps much of the memory of large messages, and the process stays several times as
large as they are. Other C libraries have no such settings, and stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from typing import Any, Final

_MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of malloc.h
LARGE_BYTES: Final = 1 << 20
TRIM_SECONDS: Final = 0.5


def return_large_blocks() -> None:
    """Let a block of `LARGE_BYTES` or more go back to the system when it is freed.

    This holds for the whole process. By default, the first free of such a block makes glibc raise
    its bound to up to 32 MiB. It then keeps blocks below the bound in heaps that a few threads
    share.
    """
    mallopt = _c_function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


class Trimmer:
    """A trim of the heap on request: free memory between used blocks returns to the system.

    It runs in a thread. gRPC receives a large message in many small pieces, none of which goes back
    by itself. Call it on one event loop.
    """

    def __init__(self) -> None:
        self._trim = _c_function("malloc_trim", ctypes.c_size_t)
        self._is_due = False

    def trim_soon(self) -> None:
        """Trim once, after `TRIM_SECONDS`, however often this is called before."""
        if self._trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_due = False  # the trim may miss what is freed from now on
        with contextlib.suppress(RuntimeError):  # the loop ends: its threads take no more work
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)


def _c_function(name: str, *argtypes: type[Any]) -> Any:
    """A function of the C library, which releases the GIL; None: the library has none."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = argtypes
    return function
