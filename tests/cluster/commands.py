"""The client commands as users have them: in a process of their own.

In the test's process, which is Ray's driver, Ray writes the workers' logs to the standard error
of whatever runs there.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


async def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvrelay`` with these arguments, to its end."""
    return await python("-m", "kvrelay.deploy", *arguments)


async def example(name: str, *arguments: str) -> str:
    """Run a program of examples/, which must end well; what it prints."""
    done = await python(EXAMPLES / name, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


async def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, to its end."""
    command = [sys.executable, *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
