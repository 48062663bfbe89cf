"""What Prometheus is told to scrape."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from kvrelay.deploy.controller.operators.controller_service import _reachable
from kvrelay.deploy.controller.operators.operators_listener import OperatorServices
from kvrelay.deploy.controller.operators.scrape_targets import ScrapeTargets
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.remote_discovery import RemoteDiscovery
from kvrelay.router.router import Router
from tests.worker_infos import worker_info

from .test_auth import NoWorkers
from .test_remote_discovery import remote

WORKER = worker_info()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["content-type"] == "application/json"
        said: bytes = answer.read()
        return said


def instances(text: bytes) -> dict[str, str]:
    """The addresses by instance; all are of one cluster."""
    targets: dict[str, str] = {}
    for one in json.loads(text):
        assert one["labels"].pop("cluster") == "mine"
        [targets[one["labels"].pop("instance")]] = one["targets"]
        assert not one["labels"]
    return targets


def test_a_router_is_listed_as_long_as_it_listens():
    targets = ScrapeTargets("mine", StaticDiscovery())
    with targets.router("h:1"), targets.router(""):
        with targets.router("h:1"):  # its next call has begun before the one before ended
            pass
        assert instances(targets.json("c:2")) == {"controller": "c:2", "router-h:1": "h:1"}
    assert instances(targets.json("")) == {}
    assert not targets._routers, "it remembers nobody who has gone"


@pytest.mark.parametrize(
    ("address", "peer", "reached"),
    [
        ("10.0.0.1:9400", "ipv4:10.9.9.9:4711", "10.0.0.1:9400"),
        ("0.0.0.0:9400", "ipv4:10.9.9.9:4711", "10.9.9.9:9400"),
        ("[::]:9400", "ipv6:%5Bfd00::9%5D:4711", "[fd00::9]:9400"),
        ("", "ipv4:10.9.9.9:4711", ""),
    ],
)
def test_a_router_that_listens_everywhere_is_reached_where_it_calls_from(
    address: str, peer: str, reached: str
):
    assert _reachable(address, peer) == reached


async def test_the_controller_lists_itself_the_workers_and_the_routers_that_follow_it(config: Any):
    discovery = StaticDiscovery([WORKER])
    router = Router(config, discovery, OperatorServices(NoWorkers(), discovery, "mine"))
    await router.start()
    try:
        assert router.admin_address is not None
        url = f"http://{router.metrics_address}/sd"
        follower: RemoteDiscovery = remote(router.admin_address)
        follower.metrics_address = "0.0.0.0:9400"
        async with follower.following():
            assert instances(await asyncio.to_thread(fetch, url)) == {
                "controller": router.metrics_address,
                "decode-0": "127.0.0.1:2",
                "router-127.0.0.1:9400": "127.0.0.1:9400",
            }
    finally:
        await router.stop()
