"""Ray's head is lost with the controller on it, and comes back with its state in Redis."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.host import Host
from tests.hosts.lan import lan
from tests.hosts.ray_nodes import START_S, RayHosts, environment
from tests.hosts.served_hosts import DISK_BYTES
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="not installed: redis-server"),
]
REDIS_PORT, CONTROLLER_PORT = 6380, 50052
REDIS = ("--port", str(REDIS_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "")


def start_redis(host: Host) -> None:
    host.spawn("redis-server", *REDIS, stdout=subprocess.DEVNULL)
    while not host.run("ss", "-H", "-tln", "sport", "=", f":{REDIS_PORT}"):
        time.sleep(0.05)


def kvrelay(host: Host, *words: str) -> str:
    process: subprocess.Popen[str] = host.spawn(
        *(sys.executable, "-m", "kvrelay.deploy", *words),
        environment=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, errors = process.communicate(timeout=START_S)
    assert process.returncode == 0, said + errors
    return said


def kill_all(host: Host) -> None:
    for process in host.processes():
        if process.pid != host.pid:
            with contextlib.suppress(psutil.Error):
                process.kill()


def test_the_controller_takes_over_the_workers_that_have_run_on():
    with lan(["head", "p", "d", "redis"], temp_bytes=DISK_BYTES) as network:
        head = network.hosts["head"]
        start_redis(network.hosts["redis"])
        redis = f"{network.hosts['redis'].address}:{REDIS_PORT}"
        # As KubeRay sets it for all pods.
        variables = {"RAY_REDIS_ADDRESS": redis, "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        ray = RayHosts.start(head, variables=variables)
        for name in ("p", "d"):
            ray.add(network.hosts[name], {"rack": name})
        model = make_checkpoint(network.shared / "tiny")
        up = ["up", "--ray-address", ray.address, "--controller-port", str(CONTROLLER_PORT)]
        up += ["--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--insecure"]
        up += ["--prefill-on", "rack=p", "--decode-on", "rack=d", "--worker-lease", "200"]
        status = ["status", "--controller", f"{head.address}:{CONTROLLER_PORT}", "--json"]
        kvrelay(head, *up)
        before = json.loads(kvrelay(head, *status))
        kill_all(head)
        RayHosts.start(head, variables=variables)
        kvrelay(head, *up)
        after = json.loads(kvrelay(head, *status))
        assert (before["epoch"], after["epoch"]) == (1, 2)
        assert len(after["workers"]) == 2
        assert after["workers"] == before["workers"], "incarnations, processes, all live"
