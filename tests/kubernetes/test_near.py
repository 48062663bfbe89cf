"""`worker.near`: prefill and decode pods come beside each other, and Ray knows which are."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")

from helm_python import HelmError

from tests.kubernetes.chart import Manifest, Pod, environment, laptop, pods, render, selects
from tests.kubernetes.schemas import violations

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
ROLES = ("prefill", "decode")


def near(label: str) -> list[Manifest]:
    values = laptop()
    values["worker"]["near"] = label
    return render(values)


def ray_labels(pod: Pod, labels: dict[str, str], node: str = "node-1") -> dict[str, str]:
    """What the pod's environment gives its node of Ray, as Ray reads it."""
    found = environment(pod.container("ray-worker"), labels, node).get("RAY_OVERRIDE_LABELS", "{}")
    read: dict[str, str] = json.loads(found)
    return read


def spread(pod: Pod) -> list[str]:
    return [one["topologyKey"] for one in pod.spec["topologySpreadConstraints"]]


@pytest.mark.parametrize("label", [ZONE, HOST, "rack"])
def test_kvrelay_is_told_the_label_and_ray_its_value(label: str):
    every = pods(near(label))
    assert f"--near={label}" in every["head"].container("controller")["args"]
    for role in ROLES:
        value = "node-1" if label == HOST else "a"
        assert ray_labels(every[role], {ZONE: "a", "rack": "a"}) == {label: value}
    assert ray_labels(every["decode"], {}, node="") == {label: ""}, "as if it were not there"


@pytest.mark.parametrize("label", [ZONE, HOST, "rack"])
def test_kubernetes_takes_it(label: str):
    assert not any(violations(manifest) for manifest in near(label))


@pytest.mark.parametrize("label", [ZONE, HOST])
def test_a_role_s_pods_spread_and_go_where_the_other_role_s_are(label: str):
    every = pods(near(label))
    for role, other in zip(ROLES, reversed(ROLES), strict=True):
        assert spread(every[role]) == list(dict.fromkeys([HOST, label])), "no key twice"
        [wish] = every[role].spec["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        term: dict[str, Any] = wish["podAffinityTerm"]
        assert term["topologyKey"] == label
        chosen = {
            name
            for name, pod in every.items()
            if selects(term["labelSelector"]["matchLabels"], pod)
        }
        assert chosen == {other}


def test_without_a_label_nothing_is_near():
    every = pods(near(""))
    assert not [word for word in every["head"].container("controller")["args"] if "near" in word]
    for role in ROLES:
        assert spread(every[role]) == [HOST]
        assert "affinity" not in every[role].spec
        assert ray_labels(every[role], {ZONE: "a"}) == {}


@pytest.mark.parametrize(
    "label", ["a b", "/zone", "kvrelay-role", "ray.io/availability-zone", "-a"]
)
def test_a_label_that_cannot_be_is_refused(label: str):
    with pytest.raises(HelmError, match="near"):
        near(label)


def test_the_label_is_not_given_by_the_options():
    values = laptop()
    values["options"]["near"] = ZONE
    with pytest.raises(HelmError, match="propertyName 'near'"):
        render(values)
