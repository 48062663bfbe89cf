"""A router in a process of its own, which can be killed: `python -m tests.chaos.router_process`.

It reads its workers from standard input: a line of JSON with those that are live and those
that are awaited, whenever that changes. It ends when its input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvrelay.net.tls import TlsFiles
from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.router.discovery import Discovery, StaticDiscovery
from kvrelay.router.router import Router
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole


def to_line(discovery: Discovery) -> bytes:
    lists = (discovery.endpoints(), discovery.awaited())
    return (json.dumps([[asdict(one) for one in workers] for workers in lists]) + "\n").encode()


def from_line(line: bytes) -> list[list[WorkerInfo]]:
    return [[_worker_info(**one) for one in workers] for workers in json.loads(line)]


def _worker_info(
    role: str, eos_token_ids: list[int], model: dict[str, str], **more: Any
) -> WorkerInfo:
    return WorkerInfo(
        role=WorkerRole(role),
        eos_token_ids=tuple(eos_token_ids),
        model=ModelDigest(**model),
        **more,
    )


async def main(
    model: Path,
    address: str,
    placement: PlacementMode,
    seed_key_file: Path | None = None,
    front_tls: TlsFiles | None = None,
) -> None:
    logging.basicConfig(level=logging.ERROR)
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    discovery = StaticDiscovery()
    discovery.replace(*from_line(await reader.readline()))
    config = RouterConfig(
        "tiny",
        model,
        "",
        grpc_address=address,
        metrics_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        placement=placement,
        seed_key_file=seed_key_file,
        front_tls=front_tls,
        chat_template=Path(__file__).with_name("chat.jinja"),
    )
    router = Router(config, discovery)
    await router.start()
    await router.wait_ready()
    # Read by whoever started this.
    print(router.grpc_address, router.metrics_address, router.http_address, flush=True)  # noqa: T201
    while line := await reader.readline():
        discovery.replace(*from_line(line))
    await router.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("address")
    parser.add_argument("placement", type=PlacementMode)
    parser.add_argument("seed_key_file", type=Path, nargs="?")
    parser.add_argument("--tls", type=Path, nargs=2)
    given = parser.parse_args()
    tls = None if given.tls is None else TlsFiles(*given.tls)
    asyncio.run(main(given.model, given.address, given.placement, given.seed_key_file, tls))
