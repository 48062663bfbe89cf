"""The chart's containers: what runs in them, with which files and rights."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")

from click import UsageError

from kvrelay.deploy.commands.leave import leave
from kvrelay.deploy.options.machine_options import Nodes
from tests.kubernetes.chart import FILES, NAME, NAMESPACE, laptop, one, pods, render, rendered
from tests.kubernetes.command_lines import controller_options, looks_options, router_options

every_file = pytest.mark.parametrize("file", FILES)


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
