"""The facts of a node that workers depend on. Everything here only reads."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import kvrelay
from kvrelay.deploy.nodes.model_copy import digest_of, files_of
from kvrelay.deploy.nodes.numa import numa_nodes
from kvrelay.wire.version import VERSION

_PACKAGES: Final = ("ray", "torch", "nixl", "grpcio")
_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of one node, sent between processes as a dict; another version may have made it."""

    name: str = ""
    """The host's name."""
    address: str = ""
    """The address at which workers would listen."""
    version: str = ""
    """The version of kvrelay."""
    code: str = ""
    """A digest of kvrelay's files."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of the packages that matter."""
    model: str | None = None
    """A digest of the requested checkpoint; empty: it is not there; None: none was requested."""
    cores: int = 0
    numa_nodes: int = 0
    """The number of NUMA nodes; where there are several, each worker keeps to one."""
    memlock_bytes: int | None = None
    """The bytes that a process may lock in memory; None: all."""
    open_files: int | None = None
    """The number of files that a process may have open; None: any number."""
    huge_pages_bytes: int = 0
    """The bytes of huge pages that the system has reserved."""
    transparent_huge_pages: str = ""
    """``always``, ``madvise`` or ``never``; empty where there are none."""
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    rdma_ports: tuple[str, ...] = ()
    """All ports of RDMA devices, each as `mlx5_0:1`."""
    rdma_ports_down: tuple[str, ...] = ()
    """The members of `rdma_ports` that are not active."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of UCX and NIXL, except UCX's log settings, which examiners set."""
    processor: str = ""
    """The processor, and the fastest that kernels use of it; empty: nobody has looked."""
    product_ways: Mapping[str, str] = field(default_factory=dict)
    """The way of each product that workers have timed there, by threads and shape."""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """Read facts of a process whose version may know more fields, or fewer."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})


def facts_of_this_node(address: str, model: str | None) -> NodeFacts:
    """Return all facts of this node. With a model it reads the whole checkpoint.

    Args:
        address: where workers would listen.
        model: the path of a checkpoint.
    """
    shared = shutil.disk_usage("/dev/shm")  # noqa: S108 (it is looked at)
    active, down = rdma_ports()
    return NodeFacts(
        name=socket.gethostname(),
        address=address,
        version=VERSION,
        code=digest_of_code(),
        packages={"python": platform.python_version(), **_versions()},
        model=None if model is None else _digest_of_model(Path(model)),
        cores=len(os.sched_getaffinity(0)),
        numa_nodes=len(numa_nodes()),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        huge_pages_bytes=huge_pages_bytes(),
        transparent_huge_pages=transparent_huge_pages(),
        shared_memory_bytes=shared.total,
        shared_memory_free_bytes=shared.free,
        rdma_ports=active + down,
        rdma_ports_down=down,
        settings={name: os.environ[name] for name in sorted(os.environ) if _is_setting(name)},
    )


def with_processor(facts: NodeFacts) -> NodeFacts:
    """Add how this node computes, or why that is not known. Imports torch, which takes seconds."""
    try:
        from kvrelay.cpu_kernels.processor import describe_processor
        from kvrelay.model_runner.layers.product_choice import measured_ways

        return replace(facts, processor=describe_processor(), product_ways=measured_ways())
    except Exception as error:  # a library that does not load, or a feature that is misspelt
        return replace(facts, processor=f"not known: {' '.join(str(error).split())}")


def digest_of_code() -> str:
    """Return a digest of kvrelay's own Python files on this node."""
    total = hashlib.sha256()
    for room in sorted(one for folder in kvrelay.__path__ for one in Path(folder).iterdir()):
        whole = room.resolve()  # it may be a link, into which rglob does not go
        for file in sorted(whole.rglob("*.py")):
            name = f"{room.name}/{file.relative_to(whole)}\n"
            total.update(name.encode() + file.read_bytes())
    return total.hexdigest()[:16]


def huge_pages_bytes(root: Path = _ROOT) -> int:
    """The bytes of huge pages that the system has reserved, of all sizes."""
    total = 0
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        kib = int(folder.name.removeprefix("hugepages-").removesuffix("kB"))
        total += 1024 * kib * int(_text(folder / "nr_hugepages") or 0)
    return total


def transparent_huge_pages(root: Path = _ROOT) -> str:
    """Return the system's setting for transparent huge pages; empty where there is none."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0]


def rdma_ports(root: Path = _ROOT) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the active ports of RDMA devices, and the others."""
    ports = {
        f"{port.parent.parent.name}:{port.name}": "ACTIVE" in _text(port / "state")
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    }
    active = tuple(name for name, is_active in ports.items() if is_active)
    return active, tuple(name for name in ports if name not in active)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _digest_of_model(path: Path) -> str:
    try:
        files = files_of(path)
    except OSError:
        return ""
    return digest_of(files)[:16] if files else ""


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _is_setting(name: str) -> bool:
    return name.startswith(("UCX_", "NIXL_")) and not name.startswith("UCX_LOG_")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
