"""What a worker finds out on its node, and makes of its configuration there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrelay.deploy.nodes.on_node import address_here, network_devices, on_this_node
from kvrelay.engine.config import WorkerConfig
from kvrelay.net.tls import TlsFileError
from kvrelay.wire.worker_info import WorkerRole
from tests.certificates import Authority

CONFIG = WorkerConfig(
    name="decode-0", role=WorkerRole.DECODE, model_path=Path("model"), model_name="model", host=""
)


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called one, at 192.0.2.1, which is no address of this machine."""
    monkeypatch.setattr(
        "kvrelay.deploy.nodes.on_node.ray.util.get_node_ip_address", lambda: "192.0.2.1"
    )
    monkeypatch.setattr("kvrelay.deploy.nodes.on_node.socket.gethostname", lambda: "one")
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")


def test_on_one_machine_workers_stay_on_loopback():
    config = replace(CONFIG, host="127.0.0.1")
    assert on_this_node(config) == config
    assert os.environ["UCX_NET_DEVICES"] == "lo"


def test_a_worker_listens_at_its_nodes_address():
    assert on_this_node(CONFIG).host == "192.0.2.1"
    assert on_this_node(CONFIG).metrics_host == "127.0.0.1"
    assert on_this_node(replace(CONFIG, metrics_host="")).metrics_host == "192.0.2.1"
    assert "UCX_NET_DEVICES" not in os.environ, "no interface has that address"


def test_devices_that_the_nodes_owner_has_chosen_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    on_this_node(replace(CONFIG, advertised={"": "127.0.0.1"}))
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_a_worker_has_no_more_threads_than_its_node_has_cores():
    cores = len(os.sched_getaffinity(0))
    assert on_this_node(replace(CONFIG, threads=cores + 1)).threads == cores
    assert on_this_node(replace(CONFIG, threads=1)).threads == 1


def test_a_worker_learns_its_nodes_locality(monkeypatch: pytest.MonkeyPatch):
    context = SimpleNamespace(get_node_labels=lambda: {"rack": "a", "zone": "z"})
    monkeypatch.setattr("kvrelay.deploy.nodes.on_node.ray.get_runtime_context", lambda: context)
    assert on_this_node(CONFIG).locality == ""
    assert on_this_node(replace(CONFIG, near="rack")).locality == "a"
    assert on_this_node(replace(CONFIG, near="row")).locality == "", "its node has no such label"


def test_a_certificate_that_does_not_name_the_node_is_refused(tmp_path: Path):
    files = Authority(tmp_path).issue(host="worker.kv")
    with pytest.raises(TlsFileError, match=r"^cert: .*192\.0\.2\.1"):
        on_this_node(replace(CONFIG, tls=files))
    on_this_node(replace(CONFIG, tls=replace(files, name="worker.kv")))
    on_this_node(replace(CONFIG, tls=Authority(tmp_path, "other").issue("b", host="192.0.2.1")))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_ucx_keeps_to_loopback(address: str):
    assert network_devices(address) == "lo"


def test_a_node_is_known_by_its_address_its_name_or_as_any():
    assert address_here({}) == "192.0.2.1"
    assert address_here({"two": "x.kv"}) == "192.0.2.1"
    assert address_here({"one": "a.kv", "": "c.kv"}) == "a.kv"
    assert address_here({"one": "a.kv", "192.0.2.1": "b.kv"}) == "b.kv"
    assert address_here({"two": "x.kv", "": "c.kv"}) == "c.kv"
