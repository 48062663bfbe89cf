from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cpu_profile import (
    RAY,
    ROUTER,
    Component,
    Profile,
    component_of,
    functions_of,
    processes_of,
    usages_of,
)
from benchmarks.threads import NATIVE, Thread, cpu_seconds, sampled, threads_of

pytestmark = pytest.mark.slow  # it tests a benchmark, and `make test-all` runs it

SPINS = """
import sys, threading

def spin_for_ever():
    while True:
        pass

threading.Thread(target=spin_for_ever, name="spinner", daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spinning() -> Iterator[int]:
    """The process id of one whose thread "spinner" takes what CPU time it gets."""
    command = [sys.executable, "-c", SPINS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process.pid
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="py-spy may look at other processes as root alone")
def test_a_thread_that_spins_is_found_by_its_name_time_and_stack(spinning):
    before = cpu_seconds([spinning])
    stacks = sampled([spinning], 1.0)[spinning]
    after = cpu_seconds([spinning])
    names = {thread.tid: thread.name for thread in threads_of(spinning, python=True)}
    used = {names[tid]: seconds - before[pid, tid] for (pid, tid), seconds in after.items()}
    assert used["spinner"] > 10 * used["MainThread"]
    (thread, *_, innermost), _ = stacks.most_common(1)[0]
    assert thread.endswith("spinner")
    assert "spin_for_ever" in innermost


def test_a_thread_of_which_python_knows_nothing_has_the_kernels_name(spinning):
    assert {thread.name for thread in threads_of(spinning, python=False)} == {
        Path(f"/proc/{spinning}/comm").read_text().strip() + NATIVE
    }


def test_a_process_that_has_ended_has_no_threads():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert cpu_seconds([process.pid]) == {}
    assert threads_of(process.pid, python=False) == []


def test_the_process_that_serves_is_the_router(spinning):
    assert processes_of(os.getpid())[os.getpid()] == ROUTER
    assert processes_of(os.getpid())[spinning] == sys.executable


@pytest.mark.parametrize(
    ("process", "thread", "component"),
    [
        ("DecodeWorker", "engine", Component.ENGINE),
        ("PrefillWorker", "kv-transfer", Component.TRANSFER),
        ("DecodeWorker", "AsyncIO Thread: default", Component.WORKER_LOOP),
        ("DecodeWorker", "Thread-1 (_poll_wrapper)", Component.WORKER_LOOP),
        ("DecodeWorker", "MainThread", Component.RAY_INSIDE),
        ("DecodeWorker", "worker.io, native", Component.RAY_INSIDE),
        ("DecodeWorker", "event_engine, native", Component.WORKER_LOOP),
        ("AggregatedWorker", "forward, native", Component.MODEL),
        ("DecodeWorker", "grammar-masks_0", Component.SAMPLING),
        (ROUTER, "MainThread", Component.ROUTER),
        (ROUTER, "kvrelay-text_0", Component.ROUTER),
        (ROUTER, "Thread-1 (_poll_wrapper)", Component.ROUTER),
        (ROUTER, "supervisors", Component.RAY_INSIDE),
        (RAY, "MainThread", Component.RAY),
    ],
)
def test_what_a_thread_works_for(process: str, thread: str, component: Component):
    assert component_of(process, thread) is component


FORWARD = "thread (2): forward"
STACKS = Counter(
    {
        (FORWARD, "/src/kvrelay/engine/executor/step.py:1", "/x/model_runner/runner.py:1"): 6,
        (FORWARD, "run (/x/model_runner/sampling/sampler.py:1)"): 3,
        (FORWARD, "make_batch (/x/kvrelay/engine/executor/model_executor.py:1)"): 1,
        ("thread (3): engine", "run (/x/kvrelay/engine/loop.py:7)", "wait (threading.py:1)"): 4,
        ("thread (3): engine", "run (/x/kvrelay/engine/loop.py:9)"): 4,
    }
)


def test_a_forward_threads_time_is_split_by_its_stacks_and_no_other_threads():
    threads = [Thread(1, 2, "forward"), Thread(1, 3, "engine")]
    seconds = {(1, 2): 10.0, (1, 3): 2.0}
    usages = usages_of(seconds, {1: "DecodeWorker"}, threads, {1: STACKS})
    found = Profile(100, 1.0, 0.5, tuple(usages), {})
    assert found.by_component[Component.MODEL] == pytest.approx(6.0)
    assert found.by_component[Component.SAMPLING] == pytest.approx(3.0)
    assert found.by_component[Component.STEPS] == pytest.approx(1.0)
    assert found.by_component[Component.ENGINE] == pytest.approx(2.0)
    assert found.cpu_seconds == pytest.approx(12.0)
    assert found.overhead == pytest.approx(0.25)


def test_functions_are_counted_whatever_their_line():
    assert functions_of(STACKS)["engine"] == {"run (/x/kvrelay/engine/loop.py)": 1.0}
