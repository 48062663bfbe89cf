"""What `kvrelay doctor` says of a link that is cut, and of this machine alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.hosts.conftest import ThreeHosts
from tests.hosts.ray_nodes import environment

pytestmark = [pytest.mark.alone, pytest.mark.slow]
DOCTOR = (sys.executable, "-m", "kvrelay.deploy", "doctor")


def test_a_link_that_is_cut_in_one_direction_fails_with_what_to_do(three_hosts: ThreeHosts):
    network = three_hosts.network
    p, d = network.hosts["p"], network.hosts["d"]
    three_hosts.ray.wait_for_nodes()  # `doctor` examines those that are there
    network.cut(p, d)
    try:
        doctor = network.hosts["head"].spawn(
            *(*DOCTOR, "--ray-address", three_hosts.ray.address),
            environment=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        said, _ = doctor.communicate()
    finally:
        network.heal(p, d)
    assert doctor.returncode == 1, said
    failed = [line for line in said.splitlines() if line.startswith("fail")]
    names = f"p ({p.address})", f"d ({d.address})"
    assert len(failed) == 2, said
    for line in failed:
        assert all(name in line for name in names)
        assert "was not read in 10 s. To do: let all TCP ports between the nodes through" in line
    assert said.splitlines()[-1].startswith("3 nodes examined, 6 directions measured: 2 failures")


def test_this_machine_is_examined_alone_and_a_bound_on_its_speed_can_fail():
    doctor = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True, check=False)
    found = json.loads(doctor.stdout)
    assert doctor.returncode == 0, found["findings"]
    [node] = found["nodes"]
    assert node["facts"]["cores"] >= 1
    assert len(found["pairs"]) == 2, "two processes read from each other"
    assert all(pair["bytes_per_second"] > 0 for pair in found["pairs"])
    words = [*DOCTOR, "--min-transfer-gigabytes-per-second", "1e6"]
    slow = subprocess.run(words, capture_output=True, text=True, check=False)
    assert slow.returncode == 1
    assert "--min-transfer-gigabytes-per-second asks for 1e+06" in slow.stdout
