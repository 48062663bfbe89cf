"""Three hosts that are nodes of one Ray: a head without workers, and one node a role."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.lan import Lan, lan
from tests.hosts.ray_nodes import WHOLE_TEST_S, RayHosts
from tests.hosts.skips import WHY_NO_HOSTS

DISK_BYTES = 1 << 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of hosts the time that their processes take on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(WHOLE_TEST_S))


@dataclass(frozen=True)
class ThreeHosts:
    """The network, Ray on it, and a model in the folder that all hosts share."""

    network: Lan
    ray: RayHosts
    model: Path


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[ThreeHosts]:
    if WHY_NO_HOSTS:
        pytest.skip(WHY_NO_HOSTS)
    with lan(["head", "p", "d"], temp_bytes=DISK_BYTES) as network:
        ray = RayHosts.start(network.hosts["head"])
        for name in ("p", "d"):
            ray.add(network.hosts[name], {"rack": name})
        model = make_checkpoint(network.shared / "tiny")
        yield ThreeHosts(network, ray, model)
        shutil.rmtree(model)
