"""A router with an HTTP door in front of scripted workers that count."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from kvrelay.router.config import RouterConfig

from ..cluster import Cluster, running
from .client import counting, with_http


@pytest.fixture(scope="session")
def http_config(config: RouterConfig, tmp_path_factory: pytest.TempPathFactory) -> RouterConfig:
    return with_http(config, tmp_path_factory.mktemp("template"))


@pytest.fixture
async def cluster(http_config: RouterConfig) -> AsyncIterator[Cluster]:
    async with running(http_config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as client:
        yield client


@pytest.fixture(scope="session")
async def shared_http(http_config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """One router for all tests that leave nothing there."""
    async with counting(http_config) as (_, client):
        yield client
