"""Routers in processes of their own, one of which is killed in mid-stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.client import AsyncClient, Client
from kvrelay.client.answer import Answer
from kvrelay.router.config import PlacementMode
from kvrelay.router.discovery import Discovery
from tests.chaos.router_process import to_line


@dataclass
class RouterProcess:
    """A router that knows nothing of others."""

    address: str
    process: asyncio.subprocess.Process

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> None:
        if self.is_alive:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def router_processes(
    model: Path, discoveries: Sequence[Discovery], keys: Sequence[Path]
) -> AsyncIterator[list[RouterProcess]]:
    """One for each list of workers, with its key."""
    async with AsyncExitStack() as stack:
        routers = await asyncio.gather(
            *(_start(model, *pair) for pair in zip(discoveries, keys, strict=True))
        )
        for router in routers:
            stack.push_async_callback(router.kill)
        yield routers


async def _start(model: Path, discovery: Discovery, key: Path) -> RouterProcess:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.chaos.router_process", str(model), "127.0.0.1:0"),
        *(PlacementMode.DISAGGREGATED, str(key)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(to_line(discovery))
    async with asyncio.timeout(120):
        said = (await process.stdout.readline()).decode().split()
    return RouterProcess(said[0], process)


async def ask_and_kill(
    routers: Sequence[RouterProcess], prompt: list[int], *, blocking: bool, **sampling: Any
) -> tuple[Answer, int]:
    """An answer whose router was killed, and how many tokens had come when it was."""
    addresses = [router.address for router in routers]
    if blocking:
        return await asyncio.to_thread(_ask_in_thread, addresses, routers, prompt, sampling)
    answer, killed_at = Answer(), 0
    async with AsyncClient(addresses) as client:
        async for response in client.generate(prompt, **sampling):
            answer.take(response)
            if not killed_at:
                killed_at = len(answer.token_ids)
                await serving(client, routers).kill()
    return answer, killed_at


def _ask_in_thread(
    addresses: list[str],
    routers: Sequence[RouterProcess],
    prompt: list[int],
    sampling: dict[str, Any],
) -> tuple[Answer, int]:
    answer, killed_at = Answer(), 0
    with Client(addresses) as client:
        for response in client.generate(prompt, **sampling):
            answer.take(response)
            if not killed_at:
                killed_at = len(answer.token_ids)
                serving(client, routers).process.kill()
    return answer, killed_at


def serving(client: AsyncClient | Client, routers: Sequence[RouterProcess]) -> RouterProcess:
    """The router that has the client's call."""
    [one] = [router for router in routers if client._balancer._routers[router.address].calls]
    return one
