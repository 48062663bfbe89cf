"""The router's process: its ports, its start and its rest."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.router import Router

from .cluster import Cluster, collect


@pytest.mark.parametrize("listener", ["grpc_address", "metrics_address"])
async def test_a_port_in_use_is_one_clear_line(
    cluster: Cluster, config: RouterConfig, listener: str
) -> None:
    taken = getattr(cluster.router, listener)
    second = Router(dataclasses.replace(config, **{listener: taken}), StaticDiscovery())
    with pytest.raises(StartError, match=taken) as caught:
        await second.start()
    assert "\n" not in str(caught.value)


async def test_a_missing_tokenizer_is_one_clear_line(config: RouterConfig, tmp_path: Path) -> None:
    router = Router(dataclasses.replace(config, model_path=tmp_path), StaticDiscovery())
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        await router.start()


async def test_a_key_of_no_use_is_one_clear_line(config: RouterConfig, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("short")
    router = Router(dataclasses.replace(config, seed_key_file=path), StaticDiscovery())
    with pytest.raises(StartError, match=rf"^--seed-key-file: {path}: the key must have 16 to"):
        await router.start()


async def test_ports_are_free_again_after_a_stop(config: RouterConfig) -> None:
    first = Router(config, StaticDiscovery())
    await first.start()
    await first.stop()
    same = dataclasses.replace(
        config, grpc_address=first.grpc_address, metrics_address=first.metrics_address
    )
    second = Router(same, StaticDiscovery())
    await second.start()
    await second.stop()


@pytest.mark.alone
async def test_an_idle_router_does_not_work(cluster: Cluster) -> None:
    cluster.count()
    await collect(cluster.generate())
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(1.5)
    assert time.process_time() - before < 0.03
