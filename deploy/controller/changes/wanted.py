"""Which workers there are to be, against those that there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from kvrelay.wire.worker_info import WorkerRole

MOST_ADDED: Final = 64
"""Workers that one change adds; more are a slip of the finger, or several changes."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What makes a cluster have the wanted number of workers of each role."""

    added: tuple[tuple[str, WorkerRole], ...] = ()
    """New workers, by name."""
    removed: tuple[str, ...] = ()
    """Names of workers that are to drain and not to be replaced: of a role, the latest first."""

    @classmethod
    def to_reach(
        cls, wanted: Mapping[WorkerRole, int], staying: Mapping[str, WorkerRole], taken: set[str]
    ) -> Self:
        """The fewest changes that do it.

        Raises ValueError for a role that the cluster does not have, for one without workers, as
        requests could not be served any more, and for more than `MOST_ADDED` new workers.

        Args:
            wanted: the number of workers; roles that are not named stay as they are.
            staying: the workers that are not being removed, by name.
            taken: names that new workers cannot have.
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
    """The names that a worker of the role can have, those with the lowest numbers first."""
    number = 0
    while True:
        name = f"{role}-{number}"
        if name not in taken:
            yield name
        number += 1


def number_of(name: str) -> int:
    """A worker's number, which its name ends in."""
    return int(name.rpartition("-")[2])
