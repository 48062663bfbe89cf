"""The Helm chart as the Helm library renders it, and the pods that come of it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "charts" / "helm" / "kvrelay"
RELEASE, NAMESPACE = "kv", "models"
NAME = "kv-kvrelay"
Values = dict[str, Any]
Manifest = dict[str, Any]


@functools.cache
def _values_in(file: str) -> Values:
    values: Values = yaml.safe_load((CHART / file).read_text())
    return values


def laptop() -> Values:
    return copy.deepcopy(_values_in("values-laptop.yaml"))


def gpu_rdma() -> Values:
    return copy.deepcopy(_values_in("values-gpu-rdma.yaml"))


def all_of_it() -> Values:
    """What neither file sets."""
    return {
        "model": {"source": "owner/model", "hubTokenSecret": "hub"},
        "prefill": {"replicas": 2},
        "tls": {"secret": "certificates"},
        "tokenSecret": "tokens",
        "seedSecret": "seed",
        "options": {"batch-invariant": True, "strict": False, "page-size": 32, "growth-min": 0.25},
        "router": {"replicas": 1, "options": {"max-live-requests": 4096}},
        "redis": {"address": "one:6379,two:6380"},
        "networkPolicy": {"enabled": False},
    }


FILES = {"laptop": laptop, "gpu-rdma": gpu_rdma, "all": all_of_it}


def render(values: Values, release: str = RELEASE) -> list[Manifest]:
    """Every object that `helm install` would make. Raises HelmError as `helm` fails."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        templates = chart.render(values, name=release, namespace=NAMESPACE)
    texts = [text for path, text in templates.items() if not path.endswith(".txt")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]


@functools.cache
def _rendered(name: str) -> list[Manifest]:
    return render(FILES[name]())


def rendered(name: str) -> list[Manifest]:
    """The objects of one of `FILES`; the caller may change them."""
    return copy.deepcopy(_rendered(name))


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The object of this kind, and name if there are several."""
    [found] = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    ]
    return found


@dataclass(frozen=True)
class Pod:
    """A pod as it runs, with the labels that KubeRay gives it."""

    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    def container(self, name: str) -> dict[str, Any]:
        [found] = [one for one in self.spec["containers"] if one["name"] == name]
        container: dict[str, Any] = found
        return container


def pods(manifests: list[Manifest]) -> dict[str, Pod]:
    """One pod of each kind: head, prefill, decode, router."""
    return dict(_pods(manifests))


def _pods(manifests: list[Manifest]) -> Iterator[tuple[str, Pod]]:
    cluster = one(manifests, "RayCluster")
    spec = cluster["spec"]
    groups = [
        ("head", "head", "headgroup", spec["headGroupSpec"]),
        *((one["groupName"], "worker", one["groupName"], one) for one in spec["workerGroupSpecs"]),
    ]
    for name, kind, group_name, group in groups:
        template = group["template"]
        labels = {
            **template["metadata"]["labels"],
            **group.get("labels", {}),
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/node-type": kind,
            "ray.io/group": group_name,
        }
        yield name, Pod(labels, template["spec"])
    template = one(manifests, "Deployment")["spec"]["template"]
    yield "router", Pod(template["metadata"]["labels"], template["spec"])


_VARIABLE = re.compile(r"\$\((\w+)\)")


def environment(container: Mapping[str, Any], labels: Mapping[str, str], node: str) -> Values:
    """A container's variables as Kubernetes sets them, but for those of Secrets.

    Args:
        container: its specification.
        labels: of its pod while it runs.
        node: the name of the node that it runs on.
    """
    fields = {f"metadata.labels['{label}']": value for label, value in labels.items()}
    fields["spec.nodeName"] = node
    found: Values = {}
    for one in container.get("env", ()):
        if "value" in one:
            found[one["name"]] = _VARIABLE.sub(lambda name: found[name[1]], one["value"])
        elif path := one["valueFrom"].get("fieldRef", {}).get("fieldPath"):
            found[one["name"]] = fields.get(path, "")
    return found


def selects(selector: Mapping[str, str], pod: Pod) -> bool:
    return all(pod.labels.get(key) == value for key, value in selector.items())
