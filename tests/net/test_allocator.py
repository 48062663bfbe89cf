"""Memory that a process has freed goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvrelay.net import allocator

HEAD = """
import asyncio, ctypes, psutil
from kvrelay.net import allocator
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
rss = lambda: psutil.Process().memory_info().rss
def blocks(size, count):
    made = [libc.malloc(size) for _ in range(count)]
    for block in made:
        ctypes.memset(block, 1, size)
    return made
"""
LARGE = """
allocator.return_large_blocks()
libc.free(*blocks(24 << 20, 1))  # else blocks of 24 MiB would from now on lie in a heap
before, made = rss(), []
for _ in range(8):
    made += blocks(8 << 20, 1)
    pin = libc.malloc(100 << 10)  # too large for a hole elsewhere
for block in made:
    libc.free(block)
assert rss() < before + (8 << 20), rss() - before
"""
SMALL = """
before, made = rss(), blocks(16 << 10, 8192)
pin = libc.malloc(100 << 10)
for block in made:
    libc.free(block)
assert rss() > before + (100 << 20), "nothing to show"
async def until_trimmed():
    trimmer = allocator.Trimmer()
    for _ in range(3):
        trimmer.trim_soon()
        while rss() > before + (8 << 20):
            await asyncio.sleep(0.01)
asyncio.run(asyncio.wait_for(until_trimmed(), 60))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.parametrize("body", [LARGE, SMALL], ids=["large blocks", "small blocks"])
def test_freed_memory_goes_back_to_the_system(body: str) -> None:
    """In a process of its own, since this one's heap has a history."""
    subprocess.run([sys.executable, "-c", HEAD + body], check=True, timeout=60)


class CountingTrimmer(allocator.Trimmer):
    """Counts, in place of the C library."""

    def __init__(self) -> None:
        super().__init__()
        self.trims = 0
        self._trim = self.trim

    def trim(self, _: int) -> None:
        self.trims += 1


def test_it_trims_again_after_it_was_refused_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "TRIM_SECONDS", 0.0)

    async def trim_twice() -> None:
        loop, trimmer = asyncio.get_running_loop(), CountingTrimmer()
        refusing = ThreadPoolExecutor(1)
        refusing.shutdown()
        loop.set_default_executor(refusing)
        errors: list[object] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        trimmer.trim_soon()
        await asyncio.sleep(0.01)
        loop.set_default_executor(ThreadPoolExecutor(1))
        async with asyncio.timeout(60):
            while not trimmer.trims:
                trimmer.trim_soon()
                await asyncio.sleep(0.005)
        assert not errors

    asyncio.run(trim_twice())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_the_c_functions_take_their_own_types() -> None:
    assert allocator.Trimmer()._trim.argtypes == (ctypes.c_size_t,)
