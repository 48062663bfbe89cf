"""The workers that come and go: for a number of each role, and for a revision of all options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kvrelay.deploy.controller.records.ordered_changes import Changes, Replacement, Revision
from kvrelay.wire.worker_info import WorkerRole

MOST_ADDED: Final = 64
"""The most workers that one change adds; more are a typing error, or several changes."""


def changes_to_reach(
    wanted: Mapping[WorkerRole, int], staying: Mapping[str, WorkerRole], taken: set[str]
) -> Changes:
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
    return Changes(tuple(added), tuple(removed))


def replacements(
    target: Revision,
    counts: Mapping[WorkerRole, int],
    staying: Mapping[str, WorkerRole],
    revisions: Mapping[str, int],
    taken: set[str],
) -> tuple[Replacement, ...]:
    """Return the replacements that give all workers one revision, also after a stopped roll.

    Args:
        target: the revision that they are to have.
        counts: the number of workers that each role is to have.
        staying: the workers that are not being removed, by name.
        revisions: the number of each worker's revision, by name.
        taken: the names that new workers cannot have.
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
    """Yield first the missing workers; surplus old ones then leave without a new one."""
    for _ in range(missing):
        yield Replacement(role, "", next(free))
    for number, name in enumerate(old):
        yield Replacement(role, name, "" if number < -missing else next(free))


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
