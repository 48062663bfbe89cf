"""The product's sources, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOMS = (
    "deploy",
    "router",
    "prefill_worker",
    "decode_worker",
    "aggregated_worker",
    "engine",
    "kv_transfer",
    "model_runner",
    "mem_cache",
    "cpu_kernels",
    "pacing",
    "wire",
    "client",
    "text",
    "device",
    "observe",
    "net",
    "options",
)
"""The product's rooms; `proto` holds generated code."""


@dataclass(frozen=True)
class Source:
    """One file of Python.

    Attributes:
        path: relative to the root, with slashes.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @property
    def folder(self) -> str:
        """The folder's path, relative to the root."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The file's name, without its ending."""
        return self.path.rpartition("/")[2].removesuffix(".py")

    @property
    def module(self) -> str:
        """The name that an import uses."""
        return "kvrelay." + self.path.removesuffix(".py").replace("/", ".")

    @property
    def imported(self) -> set[str]:
        """Names of modules that the file imports; of a package, each name that it takes there."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found |= {f"{node.module}.{one.name}" for one in node.names}
        return found


def read_sources(root: Path, rooms: tuple[str, ...] = ROOMS) -> list[Source]:
    """Every Python file of the `rooms` below `root`, sorted by path."""
    paths = sorted(path for room in rooms for path in (root / room).rglob("*.py"))
    return [Source(path.relative_to(root).as_posix(), path.read_text()) for path in paths]
