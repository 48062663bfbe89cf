from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.idle_cpu import cluster_pids, cpu_fraction, is_ray_process, is_raylet, main

pytestmark = pytest.mark.slow  # it tests a benchmark, and `make test-all` runs it

WAIT = "import sys; sys.stdin.read()"
SPIN = "while True: pass"
Spawn = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python processes. Those and their children that wait end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()  # closes the standard input that its children share


def test_a_spinning_process_uses_a_core_and_a_sleeping_one_nothing(spawn):
    spinning, sleeping = spawn(SPIN), spawn(WAIT)
    assert cpu_fraction([sleeping.pid], 0.3) < 0.3
    assert 0.2 < cpu_fraction([spinning.pid, sleeping.pid, spinning.pid], 1.0) < 1.1


def test_a_process_that_is_not_there_is_an_error(spawn):
    process = spawn("pass")
    process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        cpu_fraction([process.pid], 0.1)


RAY = "/venv/lib/python3.11/site-packages/ray"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"{RAY}/core/src/ray/gcs/gcs_server", "--log_dir=x"],
        [f"{RAY}/core/src/ray/raylet/raylet", "--raylet_socket_name=x"],
        ["python", "-u", f"{RAY}/autoscaler/_private/monitor.py"],
        ["python", f"{RAY}/dashboard/dashboard.py", "--host=127.0.0.1"],
        ["python", "-u", f"{RAY}/_private/log_monitor.py"],
        ["python", f"{RAY}/_private/workers/default_worker.py"],
        ["ray::IDLE", ""],
        ["ray::DashboardAgent", ""],
        ["ray::RuntimeEnvAgent", ""],
        ["ray-dashboard-MetricsHead-0", "(python"],
    ],
)
def test_rays_own_processes(arguments):
    assert is_ray_process(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ray::DecodeWorkerActor.loop", ""],
        ["ray::PrefillWorkerActor", ""],
        ["python", "/venv/bin/kvrelay", "serve"],
        ["python", "-c", "from multiprocessing.spawn import spawn_main"],
        [],
    ],
)
def test_processes_that_count(arguments):
    assert not is_ray_process(arguments)
    assert not is_raylet(arguments)


TREE = f"""
import subprocess, sys
def start(title, code={WAIT!r}):
    subprocess.Popen([title, "-c", code], executable={sys.executable!r})
"""


def test_workers_under_the_raylet_count_and_rays_own_do_not(spawn):
    raylet = f"{TREE}\nstart('ray::DecodeWorkerActor'); start('ray::IDLE'); {WAIT}"
    dashboard = f"{TREE}\nstart('python-helper'); {WAIT}"
    serve = spawn(
        f"{TREE}\n"
        f"start('/x/ray/core/src/ray/raylet/raylet', {raylet!r})\n"
        f"start('/x/ray/dashboard/dashboard.py', {dashboard!r})\n"
        f"start('own-helper'); {WAIT}"
    )
    # A child has its parent's title until it has its own.
    leaves = {"ray::DecodeWorkerActor", "ray::IDLE", "python-helper", "own-helper"}
    while not leaves <= titles(psutil.Process(serve.pid).children(recursive=True)):
        assert serve.poll() is None
        time.sleep(0.01)
    counted = [psutil.Process(pid) for pid in cluster_pids(serve.pid)]
    assert len(counted) == 3
    assert titles(counted) == {sys.executable, "ray::DecodeWorkerActor", "own-helper"}


def titles(processes: list[psutil.Process]) -> set[str]:
    return {title for process in processes for title in process.cmdline()[:1]}


def test_the_command_prints_a_sum_and_holds_it_against_a_limit():
    options = ["--pids", str(os.getpid()), "--seconds", "0.1"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0
    assert "of one core in 1 process\n" in result.output
    document = json.loads(CliRunner().invoke(main, [*options, "--json"]).output)
    assert document["processes"][0]["pid"] == os.getpid()


def test_the_command_fails_above_its_limit(spawn):
    process = spawn(SPIN)
    options = ["--pids", str(process.pid), "--seconds", "0.5", "--limit", "5"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1
    assert "above the limit of 5%" in result.output


@pytest.mark.parametrize("options", [[], ["--pids", "one"], ["--pids", "4194304"]])
def test_bad_options_end_with_one_clear_line(options):
    result = CliRunner().invoke(main, options)
    assert result.exit_code != 0
    assert "Error" in result.output
