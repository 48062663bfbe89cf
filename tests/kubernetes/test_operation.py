"""What a scheduler, an eviction, a probe, an upgrade or Prometheus exercises of the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")

import yaml

from kvrelay.deploy.commands.leave import leave
from tests.kubernetes.chart import (
    FILES,
    NAME,
    NAMESPACE,
    ROOT,
    Manifest,
    Pod,
    gpu_rdma,
    one,
    pods,
    rendered,
    selects,
)
from tests.kubernetes.command_lines import controller_options, router_options

every_file = pytest.mark.parametrize("file", FILES)


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


@every_file
def test_a_router_has_time_to_drain_behind_its_hook(file: str):
    manifests = rendered(file)
    router, (options, _) = pods(manifests)["router"], router_options(manifests)
    [_, slept] = router.container("router")["lifecycle"]["preStop"]["exec"]["command"]
    assert float(slept) == 5, "the drain itself is what waits for streams"
    assert router.spec["terminationGracePeriodSeconds"] == options.drain_seconds + 30
    assert (options.drain_seconds, file != "laptop") in ((10, False), (300, True))


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


RULES = ROOT / "deploy" / "charts" / "prometheus" / "rules.yml"


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


def test_routers_of_before_an_upgrade_do_not_count_where_new_ones_spread():
    [constraint] = pods(rendered("laptop"))["router"].spec["topologySpreadConstraints"]
    assert constraint["matchLabelKeys"] == ["pod-template-hash"]
