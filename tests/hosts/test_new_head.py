"""Ray's head is lost with the controller on it, and comes back with its state in Redis."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.hosts.host import Host
from tests.hosts.lan import lan
from tests.hosts.ray_nodes import RayHosts, environment, kvrelay, start_redis
from tests.hosts.served_hosts import DISK_BYTES
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="not installed: redis-server"),
]
CONTROLLER_PORT = 50052
_AGAIN_IF_IT_FAILS = 'until "$@"; do sleep 1; done'


def run_as_the_chart_does(head: Host, bin_folder: Path, *up: str) -> str:
    """Run the controller's container of the chart, again if it fails, as Kubernetes does.

    Returns the line that says that the cluster is there. The container runs on with the host.
    """
    pytest.importorskip("helm_python", reason="the package helm-python-sdk renders the chart")
    from tests.kubernetes.chart import NAME, pods, rendered

    container = pods(rendered("laptop"))["head"].container("controller")
    command = [word.replace(f"{NAME}-controller", head.address) for word in container["command"]]
    bin_folder.mkdir(exist_ok=True)
    program = bin_folder / "kvrelay"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvrelay.deploy "$@"\n')
    program.chmod(0o755)
    own = environment()
    process = head.spawn(
        *("sh", "-c", _AGAIN_IF_IT_FAILS, "sh", *command, *up),
        environment={**own, "PATH": f"{bin_folder}:{own['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "runs already" in line or "Ready in" in line:
            return str(line)
    raise AssertionError("it is tried again for ever")


def test_the_controller_takes_over_the_workers_that_have_run_on():
    with lan(["head", "p", "d", "redis"], temp_bytes=DISK_BYTES) as network:
        head = network.hosts["head"]
        redis = start_redis(network.hosts["redis"])
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
        kvrelay(head, *up).check_returncode()
        before = json.loads(kvrelay(head, *status).stdout)
        ray.kill_head()
        RayHosts.start(head, variables=variables)
        kvrelay(head, *up).check_returncode()
        after = json.loads(kvrelay(head, *status).stdout)
        assert (before["epoch"], after["epoch"]) == (1, 2)
        assert len(after["workers"]) == 2
        assert after["workers"] == before["workers"], "incarnations, processes, all live"

        ray.kill_head()
        RayHosts.start(head, variables=variables)
        changed = [*up, "--decode", "2", "--max-running", "8"]
        said = run_as_the_chart_does(head, network.shared / "bin", *changed)
        assert "runs already; the values given here change nothing in it" in said
        last = json.loads(kvrelay(head, *status).stdout)
        assert (last["epoch"], last["workers"]) == (3, before["workers"])
