"""Attackers in a process of their own: `python -m tests.attack.attackers GRPC HTTP`.

A line of its input names an attack, which then goes on until the next line; an empty line ends it.
Each is confirmed by a line of output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys

from tests.attack.cases import CASES


async def main(address: str, http: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        failed = ""
        if attack is not None:
            if attack.done():
                failed = f"{attack.exception()!r}"
            attack.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await attack
        attack = None
        if name := line.strip():
            attack = asyncio.ensure_future(CASES[name](address, http))
        sys.stdout.write(f"{failed or 'ok'}\n")
        sys.stdout.flush()
    os._exit(0)  # connections end with the process


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
