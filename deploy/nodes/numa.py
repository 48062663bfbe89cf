"""The binding of a worker to one NUMA node of its machine, where the machine has several.

Its threads run on that node's cores alone. Linux takes a page from the node of the core that first
writes it, as long as that node has free memory. So weights and pools lie beside the cores that
compute with them. Memory itself is not bound. A bound process is killed when its node is full, and
containers may not bind memory. A policy that the process was started with (numactl) stays.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
_SYS: Final = Path("/sys")
_TOTAL: Final = re.compile(r"MemTotal:\s+(\d+) kB")
_CLAIM: Final = "kvrelay/numa"
_MOST_SHARERS: Final = 1024


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node: cores, and the memory beside them."""

    number: int
    cores: frozenset[int]
    """The node's cores that the process may run on."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NumaHome:
    """The node that this process keeps to."""

    node: NumaNode
    _claim: socket.socket
    """A bound socket whose name marks the node as taken; the system closes it with the process."""


def numa_nodes(sys: Path = _SYS) -> tuple[NumaNode, ...]:
    """Return the nodes, by number, with memory and with cores that this process may run on.

    Args:
        sys: the folder in which the system describes its hardware.
    """
    allowed = os.sched_getaffinity(0)
    found = []
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            cores = frozenset(parse_cores((folder / "cpulist").read_text())) & allowed
            total = _TOTAL.search((folder / "meminfo").read_text())
            nbytes = 1024 * int(total[1]) if total else 0
            if cores and nbytes:
                found.append(NumaNode(int(folder.name.removeprefix("node")), cores, nbytes))
    return tuple(sorted(found, key=lambda node: node.number))


def parse_cores(text: str) -> Iterable[int]:
    """Yield the numbers in `0-3,8`; none in an empty list."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def keep_to_one_node(threads: int, device: str, sys: Path = _SYS) -> NumaHome | None:
    """Let all threads of this process run only on the cores of one node.

    It is the node of the worker's GPU, or else the one with the fewest workers. Workers see each
    other only within one network namespace. Call it before threads start that allocate memory, and
    keep the result alive.

    Args:
        threads: the number of threads of one forward pass.
        device: ``cpu`` or ``cuda``.
        sys: the folder in which the system describes its hardware.

    Returns:
        the node; None: the machine has one node, or no node has enough cores.
    """
    nodes = numa_nodes(sys)
    if len(nodes) < 2:
        return None
    if device == "cuda":
        beside = _node_of_gpu(_gpu_address(), sys)
        nodes = tuple(node for node in nodes if node.number == beside) or nodes
    else:
        nodes = tuple(node for node in nodes if len(node.cores) >= threads)
    home = _claim(nodes_from(nodes, _network()))
    if home is None:
        _log.info("%d threads take more than one NUMA node", threads)
        return None
    _run_on(home.node.cores)
    _log.info("runs on NUMA node %d, %d cores", home.node.number, len(home.node.cores))
    return home


def nodes_from(nodes: Sequence[NumaNode], network: int) -> list[NumaNode]:
    """Rotate the nodes by a number from the network namespace.

    Workers in different namespaces cannot see each other, so they must not all begin with the
    first.

    Args:
        nodes: the nodes, in the same order for all workers.
        network: the number of a network namespace.
    """
    start = zlib.crc32(network.to_bytes(8, "big")) % max(1, len(nodes))
    return [*nodes[start:], *nodes[:start]]


def _network() -> int:
    """Return the number of this process's network namespace, in which a claim is visible."""
    return Path("/proc/self/ns/net").stat().st_ino


def _claim(nodes: Sequence[NumaNode]) -> NumaHome | None:
    """Claim the node with the fewest workers in this network namespace; on a tie, the first."""
    for turn, node in itertools.product(range(_MOST_SHARERS), nodes):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0{_CLAIM}/{node.number}/{turn}")  # a name that is no file
        except OSError:  # another worker has it
            claim.close()
            continue
        return NumaHome(node, claim)
    return None


def _run_on(cores: frozenset[int]) -> None:
    """Move all threads of this process; threads that they start later inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _node_of_gpu(address: str, sys: Path) -> int | None:
    """Return the node that a GPU is attached to; None if the system does not tell it."""
    try:
        number = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if number < 0 else number


def _gpu_address() -> str:
    """Return the PCI address of this process's GPU, as the system writes it."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    domain, bus, device = (getattr(gpu, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
