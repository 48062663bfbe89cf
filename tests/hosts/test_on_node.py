"""What a worker finds out on its node; on a host, which has one interface beside loopback."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.hosts.host import DEVICE, Host
from tests.hosts.lan import lan
from tests.hosts.skips import WHY_NO_HOSTS

_ASK = """
import sys
from kvrelay.deploy.nodes.on_node import network_devices
for address in sys.argv[1:]:
    print(network_devices(address))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    if WHY_NO_HOSTS:
        pytest.skip(WHY_NO_HOSTS)
    with lan(["a"]) as network:
        yield network.hosts["a"]


def devices(host: Host, *addresses: str) -> list[str]:
    """What one process says of each."""
    return host.run(sys.executable, "-c", _ASK, *addresses).splitlines()


def test_ucx_keeps_to_the_interface_with_the_workers_address(host: Host):
    *known, unknown = devices(host, host.addresses.ipv4, host.addresses.ipv6, "a", "192.0.2.1")
    assert known == [DEVICE] * 3
    assert unknown == "None", "all, where it cannot be told"


@pytest.mark.parametrize("label", [DEVICE, f"{DEVICE}:more"])
def test_an_interface_is_known_by_any_of_its_addresses(host: Host, label: str):
    host.run("ip", "address", "replace", "192.0.2.7/24", "dev", DEVICE, "label", label)
    assert devices(host, "192.0.2.7") == [DEVICE]
    host.run("ip", "address", "delete", "192.0.2.7/24", "dev", DEVICE)
