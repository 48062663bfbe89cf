"""Which workers are replaced by which, when all are to have other options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kvrelay.deploy.controller.changes.wanted import free_names, number_of
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class Revision:
    """Options of workers, as they were at one time."""

    number: int = 0
    """Greater than those of the revisions before; 0: the options of the start."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Those that differ from the options of the start, as a command line has them."""


FIRST: Final = Revision()


@dataclass(frozen=True, slots=True)
class Replacement:
    """One worker takes the place of another."""

    role: WorkerRole
    old: str
    """Its name; empty: the new one takes the place of one that has left already."""
    new: str
    """Its name; empty: the old one's place has been taken already."""


@dataclass(frozen=True, slots=True)
class Roll:
    """All workers are being replaced. It is under way unless it has failed."""

    target: Revision
    """What all workers are to have."""
    left: tuple[Replacement, ...]
    """Those that are not finished."""
    workers: int
    """That there were to replace."""
    max_surge: int
    max_unavailable: int
    counts: Mapping[WorkerRole, int]
    """Workers of each role that there are to be in the end."""
    failed: str = ""
    """Why it has stopped; empty while it goes on."""

    @classmethod
    def from_plain(cls, read: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` makes of it, and JSON of that."""
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
        """The names of workers that are about to start, if it goes on."""
        return frozenset() if self.failed else frozenset(one.new for one in self.left if one.new)


def replacements(
    target: Revision,
    counts: Mapping[WorkerRole, int],
    staying: Mapping[str, WorkerRole],
    revisions: Mapping[str, int],
    taken: set[str],
) -> tuple[Replacement, ...]:
    """What makes all workers have one revision, role by role, whatever a stopped roll has left.

    Args:
        target: what they are to have.
        counts: workers of each role that there are to be.
        staying: the workers that are not being removed, by name.
        revisions: the number of each one's revision, by name.
        taken: names that new workers cannot have.
    """
    there = Counter(staying.values())
    return tuple(
        replacement
        for role in WorkerRole
        for replacement in _of_role(
            role,
            counts.get(role, 0) - there[role],
            sorted(
                (n for n in staying if staying[n] is role and revisions[n] != target.number),
                key=number_of,
            ),
            free_names(role, taken | staying.keys()),
        )
    )


def _of_role(
    role: WorkerRole, missing: int, old: list[str], free: Iterator[str]
) -> Iterator[Replacement]:
    """Workers that are missing come first, and those whose successors are there leave."""
    for _ in range(missing):
        yield Replacement(role, "", next(free))
    for number, name in enumerate(old):
        yield Replacement(role, name, "" if number < -missing else next(free))
