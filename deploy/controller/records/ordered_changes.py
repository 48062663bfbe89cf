"""The changes of a cluster that operators order, as a controller writes them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class Changes:
    """The workers to add and to remove so that each role has its wanted number."""

    added: tuple[tuple[str, WorkerRole], ...] = ()
    """The new workers' names and roles."""
    removed: tuple[str, ...] = ()
    """The workers to drain without replacement; within a role, the latest first."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A set of workers' options, with its number."""

    number: int = 0
    """The number, greater than that of earlier revisions; 0: the options of the start."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options that differ from those of the start, as a command line has them."""


FIRST: Final = Revision()


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of one worker by another."""

    role: WorkerRole
    old: str
    """The old worker's name; empty: it has left already."""
    new: str
    """The new worker's name; empty: it has started already."""


@dataclass(frozen=True, slots=True)
class Roll:
    """The replacement of all workers, which is under way unless it has failed."""

    target: Revision
    """The revision that all workers are to have."""
    left: tuple[Replacement, ...]
    """The replacements that are not finished."""
    workers: int
    """The number of workers to replace at the roll's beginning."""
    max_surge: int
    max_unavailable: int
    counts: Mapping[WorkerRole, int]
    """The number of workers that each role is to have in the end."""
    failed: str = ""
    """The reason why it has stopped; empty while it goes on."""

    @classmethod
    def from_plain(cls, read: Mapping[str, Any]) -> Self:
        """Make a roll of the dict that `dataclasses.asdict` and JSON have made of one."""
        left = [Replacement(**one | {"role": WorkerRole(one["role"])}) for one in read["left"]]
        return cls(
            target=Revision(**read["target"]),
            left=tuple(left),
            workers=read["workers"],
            max_surge=read["max_surge"],
            max_unavailable=read["max_unavailable"],
            counts={WorkerRole(role): count for role, count in read["counts"].items()},
            failed=read["failed"],
        )

    @property
    def coming(self) -> frozenset[str]:
        """The names of workers that are about to start, if the roll goes on."""
        return frozenset() if self.failed else frozenset(one.new for one in self.left if one.new)
