"""The router's process: its ports, its start and its rest."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.router import Router
from tests.idle import least_cpu_seconds
from tests.ports import free_port

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
    grpc_address, metrics_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = dataclasses.replace(config, grpc_address=grpc_address, metrics_address=metrics_address)
    for _ in range(2):
        router = Router(config, StaticDiscovery())
        await router.start()
        await router.stop()


async def test_an_idle_router_does_not_work(cluster: Cluster) -> None:
    cluster.count()
    await collect(cluster.generate())
    await asyncio.sleep(0.2)
    assert await least_cpu_seconds(1.5, 0.03) < 0.03
