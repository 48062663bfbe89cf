"""The pods of the chart, each on a host of its own, with the command lines that it gives them.

What Kubernetes does for them is done here: containers of the image, with a read-only file system
and not as root, volumes that the containers of a pod share, names of services. What KubeRay does,
too: it starts Ray in the first container, with the parameters of the group.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.hosts.host import Host
from tests.hosts.lan import Lan, lan
from tests.hosts.skips import WHY_NO_HOSTS
from tests.kubernetes.chart import NAME, Manifest, environment, laptop, one, pods, render
from tests.kubernetes.image import Container

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(2400)]
HEAD = f"{NAME}-controller"
"""The controller's Service, which has the address of the head's host."""
TOKEN = "0123456789abcdef" * 2
START_S = 400
GCS = f"{HEAD}:6379"
ZONE = "topology.kubernetes.io/zone"
NODE_LABELS = {ZONE: "a"}
"""What Kubernetes copies from a node to its pods."""
_WAIT_AND_DO = f'until ray health-check --address {GCS}; do sleep 1; done; exec "$@"'
"""KubeRay's init container waits so."""
_AGAIN_IF_IT_FAILS = 'until "$@"; do sleep 2; done'


class RunningPods:
    """The pods of a rendered chart, one of each kind, on the hosts of a network."""

    def __init__(self, manifests: list[Manifest], root: Path, network: Lan) -> None:
        self._pods = pods(manifests)
        self._network = network
        cluster = one(manifests, "RayCluster")["spec"]
        self._groups = {"head": cluster["headGroupSpec"]}
        self._groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
        self._containers = {name: Container(root, network.shared / name) for name in self._pods}
        for container in self._containers.values():
            (container.volumes / "seed" / "key").write_text("the same for all routers")
            with (container.volumes / "hosts").open("a") as hosts:
                hosts.write(f"{network.hosts['head'].address} {HEAD}\n")
                hosts.writelines(f"{one.address} {name}\n" for name, one in network.hosts.items())

    def host(self, pod: str) -> Host:
        return self._network.hosts[pod]

    def log(self, pod: str, container: str) -> Path:
        return self._network.shared / f"{pod}-{container}.log"

    def start_ray(self, pod: str) -> None:
        """As KubeRay does: in the pod's first container."""
        group, first = self._groups[pod], self._pods[pod].spec["containers"][0]
        parameters = {**group["rayStartParams"], "node-ip-address": self.host(pod).address}
        words = ["ray", "start", "--block"]
        words += ["--head"] if pod == "head" else [f"--address={GCS}"]
        words += [f"--{key}={value}" for key, value in parameters.items()]
        labels = ",".join(f"{key}={value}" for key, value in group.get("labels", {}).items())
        if pod != "head":
            words = ["sh", "-c", _WAIT_AND_DO, "sh", *words]
        self._start(pod, first, [*words, f"--labels={labels}"], own_processes=False)

    def start(self, pod: str, container: str) -> None:
        """As the chart says; again if it fails."""
        spec = self._pods[pod].container(container)
        words = ["sh", "-c", _AGAIN_IF_IT_FAILS, "sh", *spec["command"], *spec["args"]]
        shared = self._pods[pod].spec.get("shareProcessNamespace", False)
        self._start(pod, spec, words, own_processes=not shared)

    def pre_stop(self, pod: str) -> subprocess.CompletedProcess[str]:
        """Run the hook of the pod's first container in it."""
        spec = self._pods[pod].spec["containers"][0]
        hook = spec["lifecycle"]["preStop"]["exec"]["command"]
        words = self._words(pod, spec, hook, own_processes=False)
        process = self.host(pod).spawn(
            *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said, _ = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, said)

    def run(self, pod: str, script: str, *arguments: str) -> str:
        """What a program in Python prints, run in the pod's first container beside Ray."""
        spec = self._pods[pod].spec["containers"][0]
        words = self._words(pod, spec, ["python", "-c", script, *arguments], own_processes=False)
        process = self.host(pod).spawn(*words, stdout=subprocess.PIPE, text=True)
        said: str = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
        return said

    def _words(
        self, pod: str, spec: dict[str, Any], command: list[str], *, own_processes: bool
    ) -> list[str]:
        variables = environment(spec, NODE_LABELS, self.host(pod).name)
        given = [f"{name}={value}" for name, value in variables.items()]
        given += ["RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={TOKEN}", "OMP_NUM_THREADS=1"]
        words = ["env", "--chdir=/home/kvrelay", *given, *command]
        return self._containers[pod].words(*words, own_processes=own_processes)

    def _start(
        self, pod: str, spec: dict[str, Any], command: list[str], *, own_processes: bool
    ) -> None:
        words = self._words(pod, spec, command, own_processes=own_processes)
        with self.log(pod, spec["name"]).open("w") as log:
            self.host(pod).spawn(*words, stdout=log, stderr=subprocess.STDOUT)


_ZONES = f"""
import json, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Labels"].get("{ZONE}") for node in ray.nodes()]))
"""
"""What Ray's nodes say of where they are."""
_HEALTH = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://{sys.argv[1]}:52365/api/healthz", timeout=10).status)
"""
"""KubeRay's probe of Ray's pods, which Kubernetes sends to the pod's address, without a token."""


@pytest.fixture
def network() -> Iterator[Lan]:
    if WHY_NO_HOSTS:
        pytest.skip(WHY_NO_HOSTS)
    with lan(["head", "prefill", "decode", "router"]) as network:
        yield network


async def until_ready(channel: grpc.aio.Channel) -> None:
    """Ask as Kubernetes' readiness probe does."""
    health = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(START_S):
        while True:
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=3)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            await asyncio.sleep(0.5)


async def said_by(stub: inference_pb2_grpc.InferenceServiceStub, prompt: str) -> AsyncIterator[str]:
    request = pb.GenerateRequest(
        text=prompt, sampling_params=pb.SamplingParams(max_tokens=8, temperature=0)
    )
    async for response in stub.Generate(request):
        yield response.delta.text


async def test_the_pods_serve_together_and_a_worker_leaves(image_root: Path, network: Lan):
    values = laptop()
    values["worker"]["near"] = ZONE
    running = RunningPods(render(values), image_root, network)
    running.start_ray("head")
    running.start("router", "router")
    for pod in ("prefill", "decode"):
        running.start_ray(pod)
    running.start("head", "controller")
    address = f"{network.hosts['router'].address}:50051"
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        try:
            await until_ready(channel)
        except TimeoutError:
            logs = [running.log("head", "controller"), running.log("router", "router")]
            pytest.fail("\n".join(log.read_text() for log in logs))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        text = "".join([part async for part in said_by(stub, "The capital of France is")])
        assert "Paris" in text
        workers = (await stub.GetServerInfo(pb.GetServerInfoRequest())).workers
        hosts = {one.role: one.address.rpartition(":")[0] for one in workers}
        assert len(hosts) == 2
        assert set(hosts.values()) == {
            network.hosts[role].address for role in ("prefill", "decode")
        }
    zones = json.loads(await asyncio.to_thread(running.run, "head", _ZONES))
    assert sorted(zones, key=str) == [None, "a", "a"], "of the head nobody asks it"
    for pod in ("head", "prefill", "decode"):
        address = network.hosts[pod].address
        asked = await asyncio.to_thread(running.run, "head", _HEALTH, address)
        assert asked.strip() == "200", pod
    done = await asyncio.to_thread(running.pre_stop, "decode")
    assert done.returncode == 0, done.stdout
    assert "1 workers drain" in done.stdout
    assert "decode-0 has left." in done.stdout
