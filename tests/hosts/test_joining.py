"""How clusters share a Ray of three hosts, and what is said where one cannot be joined."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kvrelay.deploy.options.environment import Environment
from tests.certificates import Authority
from tests.hosts.conftest import ThreeHosts
from tests.hosts.host import Host
from tests.hosts.lan import lan
from tests.hosts.ray_nodes import (
    TOKEN,
    connected,
    environment,
    options_on,
    refusal,
    serving,
    status,
)

pytestmark = [pytest.mark.alone, pytest.mark.slow]
PROMPT = list(range(5, 105))


@pytest.fixture
def head(three_hosts: ThreeHosts) -> Host:
    return three_hosts.network.hosts["head"]


@pytest.fixture
def options(three_hosts: ThreeHosts, head: Host) -> list[str]:
    return [*options_on(head, three_hosts.model), "--ray-address", three_hosts.ray.address]


async def tokens_of(process: subprocess.Popen[str]) -> list[int]:
    cluster = await connected(process)
    answer = await cluster.generate(PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
    await cluster.assert_at_baseline()
    return answer.tokens


def test_wrong_tokens_and_addresses_are_said(head: Host, options: list[str]):
    address = options[-1]
    wrong = refusal(head, *options, variables=environment(TOKEN[::-1]))
    assert f"--ray-address: the Ray at {address} refuses the token" in wrong
    elsewhere = [*options[:-1], f"{head.address}:6000"]
    said = refusal(head, *elsewhere)
    assert f"no Ray answers at {head.address}:6000" in said


def test_a_machine_that_is_no_node_is_said(three_hosts: ThreeHosts, options: list[str]):
    with lan(["stranger"]) as network:
        host = network.hosts["stranger"]
        shutil.copytree(three_hosts.model, network.shared / "tiny")
        said = refusal(host, *options_on(host, network.shared / "tiny"), "--ray-address", "auto")
    assert "--ray-address: no Ray runs on this machine" in said


def test_too_few_resources_are_one_line(three_hosts: ThreeHosts, head: Host, options: list[str]):
    more = ("--decode-on", "rack=d", "--decode", "2", "--placement-timeout", "3")
    said = refusal(head, *options, *more)
    d = three_hosts.network.hosts["d"]
    assert "Ray has no room for 2 decode workers, 1 CPU each:" in said
    assert f"d ({d.address}) has" in said
    assert f"head ({head.address}) is not rack=d" in said


async def test_certificates_name_a_name_and_workers_listen_by_ipv6(
    three_hosts: ThreeHosts, head: Host, options: list[str]
):
    folder = three_hosts.network.shared / "tls"
    files = Authority(folder).issue(host="worker.kv")
    assert files.ca is not None
    hosts = three_hosts.network.hosts
    advertise = ",".join(f"{name}={hosts[name].addresses.ipv6}" for name in "pd")
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    front = Authority(folder, "outside").issue("front", host=head.address)
    assert front.ca is not None
    tls += ["--front-tls-cert", str(front.cert), "--front-tls-key", str(front.key)]
    options += [*tls, "--advertise", advertise, "--prefill-on", "rack=p", "--decode-on", "rack=d"]
    assert "certificate" in refusal(head, *options), "it names no address"
    with serving(head, *options, "--tls-name", "worker.kv") as process:
        cluster = await connected(process, front.ca.read_bytes())
        answer = await cluster.generate(PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
        assert len(answer.tokens) == 16
        told = status(head, cluster.grpc_address, "--ca", str(front.ca))
        assert all(str(worker["address"]).startswith("[fd") for worker in told)


async def test_a_model_that_only_one_machine_has_is_copied_to_the_nodes(
    three_hosts: ThreeHosts, head: Host, options: list[str]
):
    """Each node has a cache of its own, which is empty."""
    cache = Environment.read().cache_home / "kvrelay" / "copies"
    cache.mkdir(parents=True, exist_ok=True)
    hosts = [three_hosts.network.hosts[name] for name in ("p", "d")]
    for host in hosts:
        host.run("mount", "-t", "tmpfs", "copies", str(cache))
    model = "/tmp/tiny-of-head"
    head.run("cp", "-r", str(three_hosts.model), model)
    options += ["--model", model, "--prefill-on", "rack=p", "--decode-on", "rack=d"]
    said = refusal(head, *options)
    assert "did not start" in said
    assert "No such file" in said, "the machine of a worker lacks the model"
    with serving(head, *options, "--copy-model") as process:
        assert len(await tokens_of(process)) == 16
    for host in hosts:
        [copy] = [name for name in host.run("ls", str(cache)).split() if not name.endswith("lock")]
        said = host.run("ls", f"{cache}/{copy}")
        assert "model.safetensors" in said
        host.run("umount", str(cache))


async def test_clusters_of_two_names_share_a_ray_and_one_name_is_refused(
    head: Host, options: list[str], three_hosts: ThreeHosts
):
    options = [*options, "--aggregated", "1"]
    with serving(head, *options, "--cluster-name", "one") as first:
        tokens = await tokens_of(first)
        said = refusal(head, *options, "--cluster-name", "one")
        assert "--cluster-name: one runs in this Ray already" in said
        with serving(head, *options, "--cluster-name", "two") as second:
            assert await tokens_of(second) == tokens
        assert first.poll() is None
    assert all(host.is_up for host in three_hosts.ray.nodes.values())
    with serving(head, *options, "--cluster-name", "one") as again:
        assert await tokens_of(again) == tokens
