"""Memory that a process has freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
asyncio.run(asyncio.wait_for(until_trimmed(), 20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.parametrize("body", [LARGE, SMALL], ids=["large blocks", "small blocks"])
def test_freed_memory_goes_back_to_the_system(body: str) -> None:
    """In a process of its own, since this one's heap has a history."""
    subprocess.run([sys.executable, "-c", HEAD + body], check=True, timeout=60)
