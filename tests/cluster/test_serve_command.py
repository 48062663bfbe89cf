"""`kvrelay` as its users have it: its commands, and Ctrl-C."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.idle_cpu import cluster_pids, cpu_fraction
from tests.cluster.listening import is_loopback, listening

KVRELAY = (sys.executable, "-m", "kvrelay.deploy")
ANYWHERE = "127.0.0.1:0"
RAYS_USUAL_PORTS = {44217, 44227, 52365}
"""Of the autoscaler's and the dashboard's metrics, and the dashboard's agent."""
IDLE_LIMIT = 0.05
IDLE_SECONDS = 4.0
IDLE_LOOKS = 4
ENDS_S = 60.0
"""For what was told to end."""


@pytest.fixture
def temp() -> Iterator[Path]:
    """What `kvrelay serve` has for temporary files; pytest's own are too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def unrelated() -> Iterator[subprocess.Popen[bytes]]:
    """A process that happens to run beside."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def serve(tiny: Path, temp: Path) -> Iterator[subprocess.Popen[str]]:
    """`kvrelay serve`, in a group of its own as a shell would start it; killed if a test fails."""
    command = [*KVRELAY, "serve", "--model", str(tiny), "--dtype", "float32"]
    command += ["--grpc", ANYWHERE, "--http", ANYWHERE, "--admin", ANYWHERE, "--metrics", ANYWHERE]
    environment = {**os.environ, "TMPDIR": str(temp)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for one in started:  # Ray's have groups of their own
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def test_serve_generate_status_and_ctrl_c(
    ray: None,
    unrelated: subprocess.Popen[bytes],
    serve: subprocess.Popen[str],
    temp: Path,
    tiny: Path,
):
    address, admin, example = ready(serve)
    assert subprocess.run(example, shell=True, capture_output=True).returncode == 0
    cluster = psutil.Process(serve.pid).children(recursive=True)
    assert list(temp.glob("kvrelay-*"))
    listens_on_loopback_alone([psutil.Process(serve.pid), *cluster])
    rays_have_all_their_ports(cluster, of_this_process(beside=cluster))

    options = ("the quick brown", "--max-tokens", "8", "--temperature", "0", "--ignore-eos")
    text = run("generate", *options, "--server", address)
    lines = run("generate", *options, "--json", "--server", address).splitlines()
    *deltas, complete = map(json.loads, lines)
    assert "".join(delta["text"] for delta in deltas) == text.removesuffix("\n")
    assert sum(len(delta["token_ids"]) for delta in deltas) == 8
    assert (complete["event"], complete["finish_reason"]) == ("complete", "length")
    assert complete["usage"]["completion_tokens"] == 8
    assert text_by_another_router(admin, tiny, options) == text

    shown = run("status", "--server", address)
    report = json.loads(run("status", "--json", "--server", address))
    assert sorted(worker["role"] for worker in report["workers"]) == ["decode", "prefill"]
    for worker in report["workers"]:
        assert worker["metrics_address"] in shown
        assert {pool["pool"] for pool in worker["pools"]} == {"full", "rows"}
        for pool in worker["pools"]:
            assert pool["sum"] == pool["total"] == pool["free"] + pool["cached_evictable"]

    pids = cluster_pids(serve.pid)
    assert len(pids) == 3, "the command, a prefill and a decode worker"
    # What runs beside can make one look dear; what polls is dear at every look.
    looks = (cpu_fraction(pids, IDLE_SECONDS) for _ in range(IDLE_LOOKS))
    assert any(fraction < IDLE_LIMIT for fraction in looks)

    serve.send_signal(signal.SIGINT)
    assert serve.wait(ENDS_S) == 0
    _, alive = psutil.wait_procs(cluster, timeout=ENDS_S)
    assert alive == []
    assert list(temp.glob("kvrelay-*")) == []
    assert unrelated.poll() is None


def listens_on_loopback_alone(processes: list[psutil.Process]) -> None:
    """Router, workers, NIXL's UCX and Ray's daemons: no other machine reaches any of them."""
    doors = sorted((process.name(), *door) for process in processes for door in listening(process))
    names = {name.partition(".")[0] for name, _, _ in doors}
    assert {"gcs_server", "raylet", "ray::PrefillWorker", "ray::DecodeWorker"} <= names
    assert [door for door in doors if not is_loopback(door[1])] == []


def rays_have_all_their_ports(*clusters: list[psutil.Process]) -> None:
    """Two Rays of one machine: none listens where the other one would have liked to."""
    ports = [{port for process in one for _, port in listening(process)} for one in clusters]
    assert not ports[0] & ports[1]
    assert not RAYS_USUAL_PORTS & (ports[0] | ports[1])
    daemons = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    for daemon in daemons:
        found = [len(listening(one)) for each in clusters for one in each if one.name() == daemon]
        assert len(found) == 2, daemon
        assert found[0] == found[1] > 0, daemon


def of_this_process(*, beside: list[psutil.Process]) -> list[psutil.Process]:
    """The processes of the Ray that the tests share."""
    others = {process.pid for process in beside}
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if process.pid not in others]


def text_by_another_router(admin: str, model: Path, options: tuple[str, ...]) -> str:
    """What `kvrelay router` answers, beside the cluster's own; it has ended again then."""
    command = [*KVRELAY, "router", "--controller", admin, "--model", str(model)]
    command += ["--dtype", "float32", "--grpc", ANYWHERE, "--metrics", ANYWHERE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
        try:
            assert router.stdout is not None
            lines = list(
                itertools.takewhile(lambda line: line != "Ctrl-C stops it.\n", router.stdout)
            )
            [address] = [line.split()[1] for line in lines if line.startswith("  gRPC ")]
            text = run("generate", *options, "--server", address)
            router.send_signal(signal.SIGTERM)  # no request lives, so it waits for none
            assert router.wait(ENDS_S) == 0
        finally:
            router.kill()
    return text


def ready(serve: subprocess.Popen[str]) -> tuple[str, str, str]:
    """Where clients and operators connect, and the example to paste, once it is ready."""
    assert serve.stdout is not None
    said = ""
    for line in serve.stdout:
        said += line
        if line.startswith("Ctrl-C stops it."):
            lines = r"^  gRPC +(\S+)$.*^  admin +(127\.0\.0\.1:\d+)$.*^Try:  ([^\n]+)$"
            found = re.search(lines, said, re.MULTILINE | re.DOTALL)
            assert found, said
            return found[1], found[2], found[3]
    pytest.fail(f"it ended before it was ready:\n{said}")


def run(command: str, *arguments: str) -> str:
    done = subprocess.run([*KVRELAY, command, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
