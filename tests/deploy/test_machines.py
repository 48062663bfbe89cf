"""The options of clusters on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.deploy.deployment import worker_configs
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.nodes.ray_places import PlacementPlan, _lack
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.machine_options import Nodes, Spread
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.wire.worker_info import WorkerRole

JOINS: dict[str, Any] = {"ray_address": "10.0.0.1:6379", "insecure": True}


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--ray-address", {"ray_address": "somewhere"}),
        ("--ray-address", {"ray_address": "10.0.0.1:x"}),
        ("--cluster-name", {"cluster_name": "Chat"}),
        ("--cluster-name", {"cluster_name": "a/b"}),
        ("--cluster-name", {"cluster_name": "-"}),
        ("--cluster-name", {"cluster_name": "a" * 41}),
        ("--prefill-on", {"prefill_on": "rack"}),
        ("--decode-on", {"decode_on": "rack="}),
        ("--decode-on", {"decode_on": "resource.fast=0"}),
        ("--aggregated-on", {"aggregated_on": "resource.fast=many"}),
        ("--advertise", {"advertise": "one=[fd00::2]"}),
        ("--advertise", {"advertise": "one="}),
        ("--advertise", {"advertise": "=10.0.0.1"}),
        ("--advertise", {"advertise": "10.0.0.1,10.0.0.2"}),
        ("--advertise", {"advertise": "one=10.0.0.1, one=10.0.0.2"}),
        ("--advertise", {"advertise": "one=a.kv:1"}),
        ("--near", {"near": "rack=a"}),
        ("--worker-cpus", {"worker_cpus": 0}),
        ("--worker-gpus", {"worker_gpus": 0.0}),
        ("--placement-timeout", {"placement_timeout": 0.0}),
        ("--spread", {"spread": "far"}),
    ],
)
def test_a_bad_value_names_its_option(option: str, values: dict[str, Any]):
    with pytest.raises(OptionError) as caught:
        ServeOptions(**{**JOINS, **values})
    assert caught.value.option == option


@pytest.mark.parametrize(
    "values",
    [
        {"advertise": "127.0.0.1"},
        {"prefill_on": "rack=a"},
        {"spread": "pack"},
        {"near": "rack"},
        {"copy_model": True},
    ],
)
def test_what_only_a_ray_cluster_has_needs_one(values: dict[str, Any]):
    with pytest.raises(OptionError, match="must be given with --ray-address"):
        ServeOptions(**values)


def test_which_nodes_and_what_of_them():
    assert Nodes.parse("") == Nodes()
    nodes = Nodes.parse("rack=a, accelerator=H100,resource.fast=1.5")
    assert nodes == Nodes(
        {"rack": "a", "ray.io/accelerator-type": "H100"},
        {"fast": 1.5},
    )
    assert str(nodes) == "rack=a, ray.io/accelerator-type=H100"


def test_off_loopback_there_is_tls_or_it_is_allowed_without():
    with pytest.raises(OptionError, match=r"^--ray-address: .*--tls-cert.*--insecure"):
        ServeOptions(ray_address="auto")
    ServeOptions(ray_address="auto", insecure=True)
    ServeOptions(ray_address="auto", advertise="127.0.0.1")
    files: dict[str, Any] = {"tls_cert": Path("crt"), "tls_key": Path("key"), "tls_ca": Path("ca")}
    ServeOptions(ray_address="auto", **files)
    with pytest.raises(OptionError, match="--ray-address"):  # the others are off loopback
        ServeOptions(ray_address="auto", advertise="one=127.0.0.1")


def test_the_certificates_name_goes_to_every_worker():
    files: dict[str, Any] = {"tls_cert": Path("crt"), "tls_key": Path("key"), "tls_ca": Path("ca")}
    tls = ServeOptions(tls_name="worker.kv", **files).cluster_tls
    assert tls is not None
    assert tls.name == "worker.kv"
    with pytest.raises(OptionError, match="--tls-name: must be given with --tls-cert"):
        ServeOptions(tls_name="worker.kv")


def configs_of(monkeypatch: pytest.MonkeyPatch, **options: Any):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    return worker_configs(ServeOptions(**options), ModelFolder("none", Path()))


def test_workers_of_a_ray_cluster_learn_their_address_on_their_nodes(monkeypatch):
    options = {**JOINS, "advertise": "one=a.kv,10.0.0.2=b.kv", "worker_cpus": 3}
    for config in configs_of(monkeypatch, **options):
        assert (config.host, config.metrics_host) == ("", "127.0.0.1")
        assert config.advertised == {"one": "a.kv", "10.0.0.2": "b.kv"}
        assert config.threads == 3
        assert config.suspended_alone
        assert config.device == "cpu"
    open_metrics = Address("10.0.0.1", 9400)
    [config, _] = configs_of(monkeypatch, **JOINS, metrics=open_metrics)
    assert config.metrics_host == ""


def test_workers_of_this_machine_stay_on_loopback(monkeypatch: pytest.MonkeyPatch):
    for metrics in (Address("127.0.0.1", 0), Address("0.0.0.0", 0)):
        [config, _] = configs_of(monkeypatch, metrics=metrics, insecure=True)
        assert (config.host, config.metrics_host) == ("127.0.0.1", "127.0.0.1")
        assert not config.suspended_alone


def test_one_host_for_all_and_others_by_node():
    options = ServeOptions(**JOINS, advertise="0.0.0.0, one=a.kv")
    assert options.advertised == {"": "0.0.0.0", "one": "a.kv"}
    options = ServeOptions(**JOINS, advertise="fd00::1=fd00::2")
    assert options.advertised == {"fd00::1": "fd00::2"}


def test_the_plan_says_what_the_options_say():
    plan = PlacementPlan.from_options(
        ServeOptions(
            **JOINS,
            decode_on="rack=b",
            spread=Spread.STRICT_PACK,
            worker_cpus=7,
            placement_timeout=99,
        )
    )
    assert plan.nodes[WorkerRole.DECODE].labels == {"rack": "b"}
    assert plan.nodes[WorkerRole.PREFILL] == Nodes()
    assert (plan.cpus, plan.gpus, plan.wait_seconds) == (7, 1.0, 99)
    assert plan.names_actors
    assert plan.spread is Spread.STRICT_PACK
    assert plan.spread.strategy == "STRICT_PACK"
    assert PlacementPlan.from_options(ServeOptions()) == PlacementPlan(
        nodes=dict.fromkeys(WorkerRole, Nodes())
    )


def test_what_a_node_lacks_is_said():
    nodes, needs = Nodes.parse("rack=a"), {"CPU": 2.0, "GPU": 1.0, "fast": 1.0}
    assert _lack(nodes, needs, {"rack": "b"}, {}) == "is not rack=a"
    free = {"CPU": 1.0, "GPU": 4.0}
    assert _lack(nodes, needs, {"rack": "a"}, free) == "has 1 CPU and 0 fast free"
    free = {"CPU": 2.0, "GPU": 1.0, "fast": 1.0}
    assert _lack(nodes, needs, {"rack": "a"}, free) == "has room for one"
