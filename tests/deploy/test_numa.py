"""A worker keeps to one NUMA node. This machine may have one, so trees like /sys are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvrelay.deploy.nodes.numa import NumaNode, nodes_from, numa_nodes, parse_cores

CORES = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
_WORKER = """
import asyncio, json, os, sys, threading
from pathlib import Path
from kvrelay.deploy.nodes import numa
early = threading.Event()
seen = {}
def note(name):
    early.wait()
    seen[name] = sorted(os.sched_getaffinity(0))
before = threading.Thread(target=note, args=("before",))
before.start()
numa._CLAIM = sys.argv[1]  # apart from workers that run here
numa._gpu_address = lambda: "0000:3b:00.0"
if len(sys.argv) > 4:
    numa._network = lambda: int(sys.argv[4])
    numa._CLAIM += sys.argv[4]  # nobody else of that network is here
home = numa.keep_to_one_node(int(sys.argv[2]), sys.argv[3], Path(sys.argv[1]))
early.set()
after = threading.Thread(target=note, args=("after",))
after.start()
before.join()
after.join()
print(json.dumps([home and home.node.number, seen["before"], seen["after"]]), flush=True)
sys.stdin.read()
"""


def machine(path: Path, *nodes: str, gpu_on: int | None = None) -> Path:
    """A tree like /sys, of nodes with these cores."""
    for number, cores in enumerate(nodes):
        folder = path / "devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       1024 kB\n")
    (path / "devices/system/node/possible").write_text("0-1\n")
    if gpu_on is not None:
        (path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
        (path / "bus/pci/devices/0000:3b:00.0/numa_node").write_text(f"{gpu_on}\n")
    return path


class Worker:
    """A process that keeps to a node of a machine."""

    def __init__(
        self, machine: Path, *, threads: int = 1, device: str = "cpu", network: int | None = None
    ) -> None:
        at = [] if network is None else [str(network)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(machine), str(threads), device, *at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.node, self.cores_before, self.cores_after = json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", []), ("0-1,4-5", [0, 1, 4, 5])],
)
def test_lists_of_cores_are_read(text: str, cores: list[int]):
    assert list(parse_cores(text)) == cores


def test_a_node_counts_with_memory_and_with_cores_that_may_be_used(tmp_path: Path):
    tree = machine(tmp_path, f"{CORES[0]},4000", "4001", "", f"{CORES[-1]}")
    (tree / "devices/system/node/node3/meminfo").write_text("Node 3 MemTotal:  0 kB\n")
    [node] = numa_nodes(tree)
    assert (node.number, node.cores, node.memory_bytes) == (0, frozenset(CORES[:1]), 1 << 20)


def test_this_machine_is_read():
    nodes = numa_nodes()
    cores = [core for node in nodes for core in node.cores]
    assert sorted(cores) == CORES or not nodes  # a container may hide them


@two_cores
def test_workers_are_spread_over_the_nodes_and_a_successor_takes_its_place(tmp_path: Path):
    tree = machine(tmp_path, str(CORES[0]), str(CORES[1]))
    first, second, third = (Worker(tree) for _ in range(3))
    assert {first.node, second.node} == {0, 1}
    assert third.node == first.node
    for worker in (first, second, third):
        of_node = [CORES[worker.node]]
        assert worker.cores_before == worker.cores_after == of_node, "all threads move"
    second.end()
    successor = Worker(tree)
    assert successor.node == second.node
    for worker in (first, third, successor):
        worker.end()


@two_cores
def test_workers_that_cannot_learn_of_each_other_are_spread_too(tmp_path: Path):
    """Each has a network of its own; the system numbers these with steps that may be even."""
    tree = machine(tmp_path, str(CORES[0]), str(CORES[1]))
    workers = [Worker(tree, network=4026532300 + 6 * number) for number in range(6)]
    assert 2 <= sum(worker.node for worker in workers) <= 4
    for worker in workers:
        worker.end()


@pytest.mark.parametrize("step", [1, 2, 4, 5, 6, 8])
def test_no_node_is_first_for_most_networks(step: int):
    nodes = [NumaNode(number, frozenset({number}), 1) for number in range(4)]
    firsts = Counter(
        nodes_from(nodes, 4026532300 + step * number)[0].number for number in range(400)
    )
    assert len(firsts) == 4
    assert max(firsts.values()) < 200
    assert sorted(nodes_from(nodes, step), key=lambda node: node.number) == nodes
    assert not nodes_from([], step)


@two_cores
def test_more_threads_than_a_node_has_cores_stay_where_they_are(tmp_path: Path):
    worker = Worker(machine(tmp_path, str(CORES[0]), str(CORES[1])), threads=2)
    assert worker.node is None
    assert worker.cores_before == worker.cores_after == CORES
    worker.end()


def test_on_one_node_nothing_changes(tmp_path: Path):
    worker = Worker(machine(tmp_path, ",".join(map(str, CORES))))
    assert worker.node is None
    assert worker.cores_after == CORES
    worker.end()


@two_cores
@pytest.mark.parametrize(("gpu_on", "nodes"), [(1, {1}), (0, {0}), (-1, {0, 1})])
def test_a_worker_keeps_to_the_node_of_its_gpu(tmp_path: Path, gpu_on: int, nodes: set[int]):
    tree = machine(tmp_path, str(CORES[0]), str(CORES[1]), gpu_on=gpu_on)
    worker = Worker(tree, threads=2, device="cuda")
    assert worker.node in nodes
    worker.end()
