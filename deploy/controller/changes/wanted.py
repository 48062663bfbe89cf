"""The wanted workers, compared with those that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from kvrelay.wire.worker_info import WorkerRole

MOST_ADDED: Final = 64
"""The most workers that one change adds; more are a typing error, or several changes."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The workers to add and to remove so that each role has its wanted number."""

    added: tuple[tuple[str, WorkerRole], ...] = ()
    """The new workers' names and roles."""
    removed: tuple[str, ...] = ()
    """The workers to drain without replacement; within a role, the latest first."""

    @classmethod
    def to_reach(
        cls, wanted: Mapping[WorkerRole, int], staying: Mapping[str, WorkerRole], taken: set[str]
    ) -> Self:
        """Return the fewest changes that reach the wanted numbers.

        Raises ValueError for a role that the cluster does not have, and for more than `MOST_ADDED`
        new workers. It also raises for a role that would have no worker left, as no request could
        then be served.

        Args:
            wanted: the wanted number of workers by role; roles that are not named stay as they are.
            staying: the workers that are not being removed, by name.
            taken: the names that new workers cannot have.
        """
        counts = Counter(staying.values())
        added: list[tuple[str, WorkerRole]] = []
        removed: list[str] = []
        for role, count in wanted.items():
            if not counts[role]:
                raise ValueError(f"{role}: the cluster has no such workers")
            if count < 1:
                raise ValueError(f"{role}: must be at least 1, got {count}")
            more = count - counts[role]
            if more > MOST_ADDED:
                raise ValueError(f"{role}: {more} more; one change adds at most {MOST_ADDED}")
            names = sorted((name for name in staying if staying[name] is role), key=number_of)
            removed += reversed(names[count:])
            free = free_names(role, taken | staying.keys())
            added += [(next(free), role) for _ in range(count - len(names))]
        return cls(tuple(added), tuple(removed))


def free_names(role: WorkerRole, taken: set[str]) -> Iterator[str]:
    """Yield the names that a worker of the role can have, the lowest numbers first."""
    number = 0
    while True:
        name = f"{role}-{number}"
        if name not in taken:
            yield name
        number += 1


def number_of(name: str) -> int:
    """Return a worker's number, in which its name ends."""
    return int(name.rpartition("-")[2])
