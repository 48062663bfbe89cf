"""What a node is like, as far as workers depend on it. Everything here only reads."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
    """One node. It crosses processes as a dict, which another version may have written."""

    name: str = ""
    """Of the host."""
    address: str = ""
    """Where workers would listen."""
    version: str = ""
    """Of kvrelay."""
    code: str = ""
    """A digest of kvrelay's files."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of what is installed."""
    model: str | None = None
    """A digest of the checkpoint that was asked for; empty: it is not there."""
    cores: int = 0
    numa_nodes: int = 0
    """Of several, each worker keeps to one."""
    memlock_bytes: int | None = None
    """What a process may lock in memory; None: all."""
    open_files: int | None = None
    """That a process may have; None: any number."""
    huge_pages_bytes: int = 0
    """Reserved for whoever asks."""
    transparent_huge_pages: str = ""
    """``always``, ``madvise`` or ``never``; empty where there are none."""
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    rdma_ports: tuple[str, ...] = ()
    """Each as ``mlx5_0:1``."""
    rdma_ports_down: tuple[str, ...] = ()
    """Those of them that are not active."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """UCX's and NIXL's environment variables, but for those of UCX's log, which examiners set."""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """From a process that may have more of them, or fewer."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})


def facts_of_this_node(address: str, model: str | None) -> NodeFacts:
    """Everything that can be read here. With a model it reads that whole checkpoint.

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


def digest_of_code() -> str:
    """A digest of kvrelay's own Python files on this node."""
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
    """For whom the system makes huge pages by itself."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0]


def rdma_ports(root: Path = _ROOT) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The active ports of RDMA devices, and the others."""
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
