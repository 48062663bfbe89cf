"""Who may connect to whom: the chart's NetworkPolicies, followed from pod to pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")

from tests.kubernetes.chart import Manifest, Pod, Values, gpu_rdma, laptop, pods, render, selects
from tests.kubernetes.schemas import violations

CONTROLLER, WORKER, ROUTER, METRICS, HUB, OTLP = 50052, 41234, 50051, 9400, 443, 4317
ANYWHERE = Pod({}, {})
"""Somebody outside: only rules that name nobody let traffic from or to them through."""


@dataclass(frozen=True)
class Network:
    """The pods of some releases in one namespace, and their policies."""

    releases: Mapping[str, list[Manifest]]
    every: dict[str, Pod] = field(init=False)

    def __post_init__(self) -> None:
        every = {
            f"{name} {kind}": pod
            for name, manifests in self.releases.items()
            for kind, pod in pods(manifests).items()
        }
        object.__setattr__(self, "every", every)

    def reaches(self, one: str, other: str, port: int) -> bool:
        """Whether a pod may open a connection to a port of another one; "anywhere" is outside."""
        source = self.every.get(one, ANYWHERE)
        target = self.every.get(other, ANYWHERE)
        out = self._allowed("egress", source, target, port)
        return out and self._allowed("ingress", target, source, port)

    def _allowed(self, way: str, of: Pod, peer: Pod, port: int) -> bool:
        policies = [one for one in self._policies() if _applies(one, of, way)]
        rules = [rule for policy in policies for rule in policy.get(way, ())]
        ends = "from" if way == "ingress" else "to"
        passed = [
            _names(rule.get(ends), peer) and _opens(rule.get("ports"), port) for rule in rules
        ]
        return not policies or any(passed)

    def _policies(self) -> Iterator[dict[str, Any]]:
        for manifests in self.releases.values():
            for manifest in manifests:
                if manifest["kind"] == "NetworkPolicy":
                    yield manifest["spec"]


def _applies(policy: Mapping[str, Any], pod: Pod, way: str) -> bool:
    if pod is ANYWHERE or way.capitalize() not in policy["policyTypes"]:
        return False
    return selects(policy["podSelector"]["matchLabels"], pod)


def _names(peers: list[dict[str, Any]] | None, pod: Pod) -> bool:
    if not peers:
        return True
    return any(
        "podSelector" in one
        and bool(pod.labels)
        and selects(one["podSelector"]["matchLabels"], pod)
        for one in peers
    )


def _opens(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return ports is None or any(
        one.get("port", 0) <= port <= one.get("endPort", one.get("port", 65535))
        for one in ports
        if one.get("protocol", "TCP") == "TCP"
    )


def network(**releases: Values) -> Network:
    return Network({name: render(values, name) for name, values in releases.items()})


def test_only_the_pods_of_a_release_reach_its_workers():
    alone = network(kv=gpu_rdma(), other=gpu_rdma())
    for kind in ("head", "prefill", "decode", "router"):
        assert alone.reaches(f"kv {kind}", "kv decode", WORKER)
        assert not alone.reaches(f"other {kind}", "kv decode", WORKER)
        assert not alone.reaches(f"kv {kind}", "other head", CONTROLLER)
    assert not alone.reaches("anywhere", "kv decode", WORKER)
    assert not alone.reaches("kv decode", "kv router", ROUTER), "workers call no router"


def test_clients_reach_routers_where_nobody_is_named():
    opened = network(kv=laptop())
    assert opened.reaches("anywhere", "kv router", ROUTER)
    assert not network(kv=gpu_rdma()).reaches("anywhere", "kv router", ROUTER)


def test_routers_are_shifted_to_a_release_that_names_theirs():
    blue, green = gpu_rdma(), gpu_rdma()
    blue["networkPolicy"]["releases"], green["networkPolicy"]["releases"] = ["green"], ["blue"]
    both = network(blue=blue, green=green)
    for one, other in (("blue", "green"), ("green", "blue")):
        assert both.reaches(f"{one} router", f"{other} decode", WORKER)
        assert both.reaches(f"{one} router", f"{other} head", CONTROLLER)
        assert both.reaches(f"{one} head", f"{other} head", CONTROLLER), "the command asks both"
        assert not both.reaches(f"{one} decode", f"{other} decode", WORKER)
        assert not both.reaches(f"{one} head", f"{other} head", 6379)
        [names] = [
            manifest["spec"]["dnsNames"]
            for manifest in both.releases[other]
            if manifest["kind"] == "Certificate"
        ]
        assert f"{one}-kvrelay" in names, "by this name those routers check the workers"


def test_kubernetes_takes_policies_between_releases():
    values = gpu_rdma()
    values["networkPolicy"]["releases"] = ["green", "grey"]
    values["options"]["otlp"] = "traces"
    assert not any(violations(manifest) for manifest in render(values))


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://traces.observe:4318", 4318), ("traces.observe", OTLP)]
)
def test_spans_reach_their_collector(endpoint: str, port: int):
    values = gpu_rdma()
    values["options"]["otlp"] = endpoint
    traced = network(kv=values)
    for kind in ("head", "prefill", "decode"):
        assert traced.reaches(f"kv {kind}", "anywhere", port)
    assert not traced.reaches("kv router", "anywhere", port)
    values["router"]["options"] = {"otlp": endpoint}
    assert network(kv=values).reaches("kv router", "anywhere", port)
    assert not network(kv=gpu_rdma()).reaches("kv decode", "anywhere", port)


def test_only_a_model_that_is_on_no_volume_is_fetched():
    assert network(kv=laptop()).reaches("kv router", "anywhere", HUB)
    assert not network(kv=gpu_rdma()).reaches("kv router", "anywhere", HUB)
