"""The Helm chart: what its values make of it, against the schemas."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")
pytest.importorskip("kubernetes_validate", reason="the package has Kubernetes' schemas")

import yaml
from helm_python import HelmError
from helm_python.chart import lint

from tests.kubernetes.chart import (
    CHART,
    FILES,
    NAME,
    ROOT,
    Manifest,
    Values,
    gpu_rdma,
    laptop,
    one,
    pods,
    render,
    rendered,
)
from tests.kubernetes.command_lines import controller_options, router_options
from tests.kubernetes.schemas import violations

every_file = pytest.mark.parametrize("file", FILES)


@every_file
def test_helm_lint_finds_nothing(file: str):
    report = lint(CHART, FILES[file](), strict=True)
    assert not report["errors"], report
    assert all(message["severity"] < 2 for message in report["messages"]), report


@every_file
def test_every_object_is_what_kubernetes_and_kuberay_take(file: str):
    manifests = rendered(file)
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds >= {"RayCluster", "Deployment", "Service", "PodDisruptionBudget"}
    found = {manifest["kind"]: violations(manifest) for manifest in manifests}
    assert not any(found.values()), found
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names)


def test_the_file_for_gpus_uses_every_piece():
    kinds = {manifest["kind"] for manifest in rendered("gpu-rdma")}
    assert kinds >= {"Certificate", "PodMonitor", "ScrapeConfig", "PrometheusRule", "NetworkPolicy"}


PLANTED: list[tuple[str, str, Any]] = [
    ("RayCluster", "spec.headGroupSpecs", {}),
    ("RayCluster", "spec.authOptions.mode", "tokens"),
    ("RayCluster", "spec.upgradeStrategy.type", "Rolling"),
    ("RayCluster", "spec.gcsFaultToleranceOptions.backend", "etcd"),
    ("RayCluster", "spec.workerGroupSpecs.0.replica", 2),
    ("RayCluster", "spec.workerGroupSpecs.0.replicas", "two"),
    ("RayCluster", "spec.workerGroupSpecs.0.template.spec.graceSeconds", 3),
    ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.imagePullPolicy", "Sometimes"),
    ("RayCluster", "spec.headGroupSpec.template.spec.volumes.0.emptyDir.medium", "memory"),
    ("Deployment", "spec.replica", 1),
    ("Deployment", "spec.template.spec.containers.0.readinessProbe.httpGet.scheme", "https"),
    ("Deployment", "spec.template.spec.containers.0.resources.limits.memory", "8 GB"),
    ("Service", "spec.type", "Loadbalancer"),
    ("PodDisruptionBudget", "spec.minAvailabel", 1),
    ("NetworkPolicy", "spec.policyTypes.0", "ingress"),
    ("Certificate", "spec.issuer", "x"),
    ("Certificate", "spec.privateKey.rotationPolicy", "always"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.ports", "metrics"),
    ("PrometheusRule", "spec.groups.0.rule", []),
    ("PrometheusRule", "spec.groups.0.interval", "15 s"),
]


@pytest.mark.parametrize(("kind", "path", "value"), PLANTED, ids=[path for _, path, _ in PLANTED])
def test_unknown_fields_and_wrong_words_are_found(kind: str, path: str, value: Any):
    manifest = copy.deepcopy(next(one for one in rendered("gpu-rdma") if one["kind"] == kind))
    *parents, field = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place: Any = manifest
    for step in parents:
        place = place[step]
    place[field] = value
    [found, *_] = violations(manifest)
    assert str(field) in found


WRONG: list[tuple[Values, str]] = [
    ({"prefil": {"replicas": 2}}, "prefil"),
    ({"prefill": {"replicas": 0}}, "replicas"),
    ({"worker": {"cpu": "four", "memory": "1Gi"}}, "cpu"),
    ({"worker": {"cpu": 1, "memory": "1 GB"}}, "memory"),
    ({"worker": {"cpu": 1, "memory": "1Gi", "drainSeconds": 0}}, "drainSeconds"),
    ({"router": {"replicas": 1, "serviceType": "Loadbalancer"}}, "serviceType"),
    ({"model": {"source": "x", "dtype": "int4"}}, "dtype"),
    ({"redis": {"address": "redis"}}, "redis"),
    ({"drainSeconds": 0}, "drainSeconds"),
    ({"options": {"prefill": 3}}, "propertyName 'prefill'"),
    ({"options": {"--kv-memory": "1GiB"}}, "propertyName '--kv-memory'"),
    ({"router": {"replicas": 1, "options": {"metrics": "0.0.0.0:1"}}}, "propertyName 'metrics'"),
    ({"networkPolicy": {"clients": [{}]}}, "clients"),
    ({"tls": {"insecure": False}}, "tls: set secret or issuer.name"),
    ({"tokenSecret": "tokens"}, "tokenSecret: routers would send"),
    ({"tls": {"secret": "certificates"}}, "tokenSecret: without tokens everybody"),
    ({"tls": {"issuer": {"name": "a"}}}, "tokenSecret: without tokens everybody"),
    ({"seedSecret": "Mine"}, "seedSecret"),
]


@pytest.mark.parametrize(("values", "named"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_values_that_cannot_be_are_refused_by_name(values: Values, named: str):
    base = {"tls": {"insecure": True}}
    render(base)
    with pytest.raises(HelmError, match=named):
        render({**base, **values})


def test_every_value_is_described_by_the_schema():
    import json

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    assert len(values) == 16
    for name, value in values.items():
        described = schema["properties"][name]
        if isinstance(value, dict) and "properties" in described:
            assert set(value) == set(described["properties"]), name


def test_values_arrive_as_they_were_written():
    name = 'owner/model #2: "a"'
    values = {
        **laptop(),
        "model": {"source": "/models/a: b #c", "name": name, "claim": "007"},
        "image": {"repository": "registry.example/kvrelay", "tag": "1 #2", "pullSecrets": ["1"]},
    }
    manifests = render(values)
    assert not any(violations(manifest) for manifest in manifests)
    options, (router, _) = controller_options(manifests), router_options(manifests)
    assert options.model == router.model == "/models/a: b #c"
    assert options.model_name == router.model_name == name
    for pod in pods(manifests).values():
        assert pod.spec["imagePullSecrets"] == [{"name": "1"}]
        for container in pod.spec["containers"]:
            assert container["image"] == "registry.example/kvrelay:1 #2"


def test_seeds_come_of_a_secret_of_ones_own_or_of_one_that_is_drawn():
    def mounted(manifests: list[Manifest]) -> str:
        [volume] = [
            one for one in pods(manifests)["router"].spec["volumes"] if one["name"] == "seed"
        ]
        secret: str = volume["secret"]["secretName"]
        return secret

    drawn, mine = rendered("laptop"), render({**laptop(), "seedSecret": "mine"})
    assert mounted(drawn) == one(drawn, "Secret")["metadata"]["name"]
    assert mounted(mine) == "mine"
    assert not [one for one in mine if one["kind"] == "Secret"]


def test_redis_may_be_several_and_is_let_through():
    manifests = render({**gpu_rdma(), "redis": {"address": "one:6379,two:6380"}})
    options = one(manifests, "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert options == {"backend": "redis", "redisAddress": "one:6379,two:6380"}
    rules = one(manifests, "NetworkPolicy", f"{NAME}-ray")["spec"]["egress"]
    assert {"ports": [{"port": 6379}, {"port": 6380}]} in rules
    assert "gcsFaultToleranceOptions" not in one(rendered("laptop"), "RayCluster")["spec"]


def test_redis_is_emptied_by_a_pod_that_outlives_the_release():
    """KubeRay makes it from the head's pod, with its ServiceAccount."""
    policy = {"helm.sh/resource-policy": "keep"}
    kept = one(rendered("gpu-rdma"), "ServiceAccount")["metadata"]
    assert kept["annotations"] == policy
    assert pods(rendered("gpu-rdma"))["head"].spec["serviceAccountName"] == kept["name"]
    assert "annotations" not in one(rendered("laptop"), "ServiceAccount")["metadata"]


def test_the_chart_has_the_versions_of_the_package():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    ray_version = one(rendered("laptop"), "RayCluster")["spec"]["rayVersion"]
    assert f"ray=={ray_version}" in pinned
