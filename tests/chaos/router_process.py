"""A router in a process of its own, which can be killed: `python -m tests.chaos.router_process`.

Its workers come as lines of JSON on the standard input, the whole list each time; it ends with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery, WorkerEndpoint, WorkerRole
from kvrelay.router.router import Router


def to_line(endpoints: list[WorkerEndpoint]) -> bytes:
    return (json.dumps([asdict(one) for one in endpoints]) + "\n").encode()


def from_line(line: bytes) -> list[WorkerEndpoint]:
    return [_endpoint(**one) for one in json.loads(line)]


def _endpoint(role: str, eos_token_ids: list[int], **more: object) -> WorkerEndpoint:
    return WorkerEndpoint(role=WorkerRole(role), eos_token_ids=tuple(eos_token_ids), **more)


async def main(model: Path, address: str) -> None:
    logging.basicConfig(level=logging.ERROR)
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    discovery = StaticDiscovery(from_line(await reader.readline()))
    config = RouterConfig("tiny", model, "", grpc_address=address, metrics_address="127.0.0.1:0")
    router = Router(config, discovery)
    await router.start()
    await router.wait_ready()
    print(router.grpc_address, flush=True)  # noqa: T201 (it is read by whoever started this)
    while line := await reader.readline():
        discovery.replace(from_line(line))
    await router.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
