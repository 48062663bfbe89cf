"""A pair that is placed on nodes of one zone of a Ray of hosts, and what its router knows of it."""

from __future__ import annotations

import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.lan import lan
from tests.hosts.ray_nodes import RayHosts, connected, options_on, serving, status
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
]
ZONES = {"a1": "a", "b1": "b", "b2": "b"}


async def test_a_pair_comes_into_the_zone_that_has_room_for_it():
    with lan(["head", *ZONES]) as network:
        head = network.hosts["head"]
        ray = RayHosts.start(head)
        for name, zone in ZONES.items():
            ray.add(network.hosts[name], {"zone": zone})
        ray.wait_for_nodes()  # or the pair is parted for the room that there is by then
        model = make_checkpoint(network.shared / "tiny")
        options = [*options_on(head, model), "--ray-address", ray.address, "--near", "zone"]
        with serving(head, *options, "--placement", "disaggregated") as process:
            cluster = await connected(process)
            workers = status(head, cluster.grpc_address)
            zones = {host.address: ZONES.get(name) for name, host in network.hosts.items()}
            placed = [zones[str(one["address"]).rpartition(":")[0]] for one in workers]
            assert placed == ["b", "b"], "only there are two CPUs"
            answer = await cluster.generate([1, 2, 3], max_tokens=8, ignore_eos=True)
            assert len(answer.tokens) == 8
            await cluster.assert_at_baseline()
