"""The Helm chart: what its values make of it, against the schemas and against kvrelay's options."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")
pytest.importorskip("kubernetes_validate", reason="the package has Kubernetes' schemas")

import yaml
from click import UsageError
from helm_python import HelmError
from helm_python.chart import lint

from kvrelay.deploy.leave import leave
from kvrelay.deploy.machines import Nodes
from kvrelay.deploy.options import RouterProcessOptions
from kvrelay.deploy.router import router
from kvrelay.deploy.status import status
from kvrelay.deploy.up import up
from kvrelay.deploy.up_options import UpOptions
from tests.kubernetes.chart import (
    CHART,
    FILES,
    NAME,
    NAMESPACE,
    ROOT,
    Manifest,
    Pod,
    Values,
    gpu_rdma,
    laptop,
    one,
    pods,
    render,
    rendered,
    selects,
)
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


# What runs in the pods.


def controller_options(manifests: list[Manifest]) -> UpOptions:
    container = pods(manifests)["head"].container("controller")
    shell, option, _, _ = container["command"]
    assert (shell, option) == ("sh", "-c")
    command, *arguments = container["args"]
    assert command == up.name
    parsed = up.make_context("up", arguments).params
    del parsed["debug"]
    return UpOptions(**parsed)


def looks_options(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """How the controller's container looks whether the controller is there, in each place."""
    [_, _, script, _] = pods(manifests)["head"].container("controller")["command"]
    parsed = []
    for words in re.findall(r"\bkvrelay (?!\"\$@\")(.*?) >", script):
        command, *arguments = words.split()
        assert command == status.name
        parsed.append(status.make_context("status", arguments).params)
    return parsed


def router_options(manifests: list[Manifest]) -> tuple[RouterProcessOptions, dict[str, Any]]:
    container = pods(manifests)["router"].container("router")
    assert container["command"] == ["kvrelay"]
    command, *arguments = container["args"]
    assert command == router.name
    parsed = router.make_context("router", arguments).params
    names = ("debug", "address", "ray_address", "cluster_name", "token_file", "ca", "tls")
    own = {name: parsed.pop(name) for name in names}
    return RouterProcessOptions(**parsed), own


@every_file
def test_kvrelay_takes_every_command_line(file: str):
    manifests, values = rendered(file), FILES[file]()
    options = controller_options(manifests)
    router, own = router_options(manifests)
    wanted = {role: values.get(role, {"replicas": 1})["replicas"] for role in ("prefill", "decode")}
    assert options.roles == wanted
    assert (options.model, options.dtype) == (router.model, router.dtype)
    assert own["address"].port == options.controller_port
    assert own["address"].host == f"{NAME}-controller"
    looks = looks_options(manifests)
    assert looks
    for name in ("address", "ca", "token_file"):
        assert all(look[name] == own[name] for look in looks)
    for name, value in values.get("options", {}).items():
        given = getattr(options, name.replace("-", "_"))
        assert isinstance(value, str) or given == value
    for name, pod in pods(manifests).items():
        if name in ("prefill", "decode"):
            command, *arguments = pod.container("ray-worker")["lifecycle"]["preStop"]["exec"][
                "command"
            ]
            assert (command, arguments[0]) == ("kvrelay", leave.name)
            assert leave.make_context("leave", arguments[1:]).params["timeout"] > 0


class ControllerContainer:
    """The controller's container, in which `kvrelay` is scripted, and nobody waits.

    Args:
        folder: for its programs.
        kvrelay: a shell's script, to which `calls` is the number of calls up to this one.
    """

    def __init__(self, folder: Path, kvrelay: str) -> None:
        self._calls = folder / "calls"
        programs = {
            "kvrelay": f'echo "$1" >> {self._calls}\ncalls=$(wc -l < {self._calls})\n{kvrelay}\n',
            "sleep": "",
        }
        for name, script in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}")
            (folder / name).chmod(0o755)
        self._path = {"PATH": f"{folder}:/usr/bin:/bin"}

    def run(self) -> tuple[list[str], subprocess.CompletedProcess[str]]:
        """Run it to its end; the commands of kvrelay that it has called, and how it ended."""
        self._calls.write_text("")
        container = pods(rendered("laptop"))["head"].container("controller")
        words = [*container["command"], *container["args"]]
        done = subprocess.run(
            words, env=self._path, timeout=20, check=False, capture_output=True, text=True
        )
        return self._calls.read_text().split(), done


def test_the_controller_s_container_starts_it_and_ends_when_there_is_none(tmp_path: Path):
    """So Kubernetes starts it again, and the cluster if Ray's head has forgotten it."""
    container = ControllerContainer(
        tmp_path, 'case "$1 $calls" in "status 1" | "status 5") echo away >&2; exit 4;; esac'
    )
    calls, done = container.run()
    assert calls == ["status", "up", "status", "status", "status"]
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "away\n", "of the last one: at first it is no error"
    calls, done = ControllerContainer(tmp_path, "exit 3").run()
    assert (calls, done.returncode) == (["status", "up"], 3)


def test_the_controller_s_container_starts_no_second_one_with_changed_values(tmp_path: Path):
    """A new head finds the cluster as it is in Redis, where it was changed by `kvrelay scale`."""
    container = ControllerContainer(tmp_path, "[ $1 = status ] && [ $calls -lt 4 ]")
    calls, done = container.run()
    assert calls == ["status"] * 4
    assert done.stdout == "The cluster runs already; the values given here change nothing in it.\n"


def test_an_option_that_kvrelay_lacks_is_found():
    values = laptop()
    values["options"]["kv-memmory"] = "1GiB"
    with pytest.raises(UsageError, match="kv-memmory"):
        controller_options(render(values))


def test_workers_are_placed_on_the_pods_of_their_role():
    manifests = rendered("gpu-rdma")
    options, cluster = controller_options(manifests), one(manifests, "RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert options.nodes_for(group["groupName"]) == Nodes(group["labels"])
        assert group["rayStartParams"]["num-cpus"] == str(options.worker_cpus)
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == options.worker_gpus
        assert container["resources"]["limits"]["rdma/hca_shared_devices"] == 1
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert {"name": "UCX_IB_ADDR_TYPE", "value": "eth"} in container["env"]
    assert options.device == "cuda"
    on_cpus = rendered("laptop")
    assert controller_options(on_cpus).device == "cpu"
    limits = pods(on_cpus)["decode"].container("ray-worker")["resources"]["limits"]
    assert set(limits) == {"cpu", "memory"}


def test_only_a_model_without_a_volume_is_copied_to_the_nodes():
    assert controller_options(rendered("laptop")).copy_model
    on_a_claim = rendered("gpu-rdma")
    assert not controller_options(on_a_claim).copy_model
    for pod in pods(on_a_claim).values():
        for container in pod.spec["containers"]:
            [mount] = [one for one in container["volumeMounts"] if one["name"] == "models"]
            assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}


def test_certificates_are_where_the_options_say_and_name_what_is_called():
    manifests = rendered("gpu-rdma")
    options, (router, own) = controller_options(manifests), router_options(manifests)
    names = one(manifests, "Certificate")["spec"]["dnsNames"]
    assert {options.tls_name, own["address"].host} <= set(names)
    assert options.tls_name == router.tls_name
    secret = one(manifests, "Certificate")["spec"]["secretName"]
    for pod in pods(manifests).values():
        [volume] = [one for one in pod.spec["volumes"] if one["name"] == "tls"]
        assert volume["secret"]["secretName"] == secret
    assert str(own["ca"]) == str(options.tls_ca) == "/etc/kvrelay/tls/ca.crt"
    assert router.front_tls_cert is not None
    assert options.front_tls_cert is None, "operators and routers are shown the other one"
    assert f"{NAME}-controller.{NAMESPACE}.svc" in names


def _mounted(path: str, container: dict[str, Any]) -> bool:
    return any(path.startswith(f"{one['mountPath']}/") for one in container["volumeMounts"])


@every_file
def test_every_file_that_is_named_is_mounted(file: str):
    for pod in pods(rendered(file)).values():
        for container in pod.spec["containers"]:
            words = [one for word in container.get("command", []) for one in word.split()]
            words += container.get("args", [])
            paths = [word.partition("=")[2] for word in words]
            for path in paths:
                if path.startswith(("/etc/", "/models/")):
                    assert _mounted(path, container), path


@every_file
def test_pods_have_no_rights_and_write_nowhere_but_in_their_volumes(file: str):
    for name, pod in pods(rendered(file)).items():
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["serviceAccountName"] == NAME
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] > 0
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        assert len(volumes) == len(pod.spec["volumes"])
        for container in pod.spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes, name
            assert {"/tmp", "/home/kvrelay"} <= set(mounts)
            assert ("/dev/shm" in mounts) is (name != "router")


def test_the_controller_s_process_is_ray_s_and_has_the_files_that_it_reads():
    head = pods(rendered("gpu-rdma"))["head"]
    options = controller_options(rendered("gpu-rdma"))
    for file in (options.tls_cert, options.tls_key, options.auth_token_file):
        assert _mounted(str(file), head.container("ray-head"))


def test_the_controller_shares_ray_s_files_with_the_head():
    head = pods(rendered("laptop"))["head"]
    ray, controller = head.container("ray-head"), head.container("controller")
    shared = [one for one in ray["volumeMounts"] if one["name"] in ("tmp", "shm")]
    assert len(shared) == 2
    assert all(one in controller["volumeMounts"] for one in shared)
    assert head.spec["shareProcessNamespace"] is True, "a program finds Ray by its processes"
    assert head.spec["containers"][0] is ray, "KubeRay starts Ray in the first one"


# What a scheduler, an eviction or a probe exercises.


@every_file
def test_a_worker_has_time_to_drain_and_ray_to_end_after_it(file: str):
    manifests = rendered(file)
    grace = controller_options(manifests).drain_grace
    for role in ("prefill", "decode"):
        pod = pods(manifests)[role]
        command = pod.container("ray-worker")["lifecycle"]["preStop"]["exec"]["command"]
        waits = leave.make_context("leave", command[2:]).params["timeout"]
        assert waits > grace
        [ray] = [
            one["value"]
            for one in pod.container("ray-worker")["env"]
            if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        ]
        assert pod.spec["terminationGracePeriodSeconds"] > waits + 2 * float(ray)
    router = pods(manifests)["router"]
    [_, slept] = router.container("router")["lifecycle"]["preStop"]["exec"]["command"]
    assert router.spec["terminationGracePeriodSeconds"] > float(slept) + 5


def _selectors(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str]]]:
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        name = f"{kind} {manifest['metadata']['name']}"
        if kind == "Service":
            yield name, spec["selector"]
        elif kind in ("PodDisruptionBudget", "PodMonitor", "Deployment"):
            yield name, spec["selector"]["matchLabels"]
        elif kind == "NetworkPolicy":
            yield name, spec["podSelector"]["matchLabels"]


def _matched(selector: dict[str, str], every: dict[str, Pod]) -> set[str]:
    return {name for name, pod in every.items() if selects(selector, pod)}


def test_each_selector_finds_the_pods_it_is_meant_for():
    manifests = rendered("gpu-rdma")
    every = pods(manifests)
    found = {name: _matched(selector, every) for name, selector in _selectors(manifests)}
    ray = {"head", "prefill", "decode"}
    assert found == {
        f"Service {NAME}": {"router"},
        f"Service {NAME}-routers": {"router"},
        f"Service {NAME}-controller": {"head"},
        f"Deployment {NAME}-router": {"router"},
        f"PodDisruptionBudget {NAME}-prefill": {"prefill"},
        f"PodDisruptionBudget {NAME}-decode": {"decode"},
        f"PodDisruptionBudget {NAME}-head": {"head"},
        f"PodDisruptionBudget {NAME}-router": {"router"},
        f"PodMonitor {NAME}-ray": ray,
        f"NetworkPolicy {NAME}-ray": ray,
        f"NetworkPolicy {NAME}-router": {"router"},
        f"NetworkPolicy {NAME}-worker": {"prefill", "decode"},
    }
    for name, pod in every.items():
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert _matched(constraint["labelSelector"]["matchLabels"], every) == {name}


def test_an_eviction_takes_one_worker_of_a_role_at_a_time():
    manifests = rendered("gpu-rdma")
    spec = {
        name: one(manifests, "PodDisruptionBudget", f"{NAME}-{name}")["spec"]
        for name in ("prefill", "decode", "head", "router")
    }
    # Kubernetes refuses maxUnavailable for pods of an owner without a scale.
    assert spec["prefill"]["minAvailable"] == 3
    assert spec["decode"]["minAvailable"] == 7
    assert spec["head"]["minAvailable"] == 1
    assert spec["router"]["maxUnavailable"] == 1


def test_a_pod_that_is_not_well_keeps_no_node_from_being_drained():
    """Kubernetes evicts such a pod by default only if enough others are well."""
    budgets = [one for one in rendered("laptop") if one["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == 4
    assert all(one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for one in budgets)


def test_routers_may_wait_for_their_workers_as_long_as_these_for_a_place():
    manifests = rendered("laptop")
    waits = one(manifests, "Deployment")["spec"]["progressDeadlineSeconds"]
    assert waits > controller_options(manifests).placement_timeout


def test_routers_do_not_start_anew_when_only_the_chart_s_version_changes():
    """Each that does breaks the streams that it has."""
    labels = pods(rendered("laptop"))["router"].labels
    assert set(labels) == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}


def test_readiness_is_asked_by_grpc_or_where_clients_use_tls_by_https():
    plain = pods(rendered("laptop"))["router"].container("router")
    secret = pods(rendered("gpu-rdma"))["router"].container("router")
    options, _ = router_options(rendered("laptop"))
    assert plain["readinessProbe"]["grpc"] == {"port": options.grpc.port}
    assert secret["readinessProbe"]["httpGet"] == {
        "scheme": "HTTPS",
        "port": "http",
        "path": "/health",
    }


def test_ports_are_those_that_kvrelay_listens_on():
    manifests = rendered("laptop")
    options, _ = router_options(manifests)
    ports = {
        one["name"]: one["containerPort"]
        for one in pods(manifests)["router"].container("router")["ports"]
    }
    assert ports == {
        "grpc": options.grpc.port,
        "http": options.http.port,
        "metrics": options.metrics.port,
    }
    for service in (NAME, f"{NAME}-routers"):
        for port in one(manifests, "Service", service)["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    controller = controller_options(manifests)
    listed = one(manifests, "Service", f"{NAME}-controller")["spec"]["ports"]
    assert [one["port"] for one in listed] == [controller.controller_port, controller.metrics.port]
    policy = one(manifests, "NetworkPolicy", f"{NAME}-ray")
    [ours] = [port for port in policy["spec"]["ingress"][1]["ports"] if "endPort" in port]
    assert ours == {
        "port": controller.metrics.port,
        "endPort": controller.metrics.port + controller.workers,
    }


def test_prometheus_asks_the_controller_where_metrics_are():
    manifests = rendered("gpu-rdma")
    [asked] = one(manifests, "ScrapeConfig")["spec"]["httpSDConfigs"]
    port = controller_options(manifests).metrics.port
    assert asked == {"url": f"http://{NAME}-controller.{NAMESPACE}.svc:{port}/sd"}
    assert controller_options(manifests).cluster_name == NAME


RULES = ROOT / "deploy" / "prometheus" / "rules.yml"


def test_prometheus_is_given_the_rules():
    assert one(rendered("gpu-rdma"), "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())


def test_the_alerts_ask_for_the_job_that_is_scraped():
    rules = RULES.read_text()
    job = one(rendered("gpu-rdma"), "ScrapeConfig")["spec"]["jobName"]
    assert set(re.findall(r'job="([^"]*)"', rules)) == {job}


def test_whom_monitoring_names_reads_metrics_of_workers_at_any_port():
    manifests = rendered("gpu-rdma")
    rules = one(manifests, "NetworkPolicy", f"{NAME}-worker")["spec"]["ingress"]
    named = gpu_rdma()["networkPolicy"]["monitoring"]
    assert rules == [{"from": named, "ports": [{"protocol": "TCP"}]}]
    names = {
        one["metadata"]["name"] for one in rendered("laptop") if one["kind"] == "NetworkPolicy"
    }
    assert names == {f"{NAME}-ray", f"{NAME}-router"}, "where nobody is named, everybody could"


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


def test_the_chart_has_the_versions_of_the_package():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    ray_version = one(rendered("laptop"), "RayCluster")["spec"]["rayVersion"]
    assert f"ray=={ray_version}" in pinned
