"""Forwards that failed with a request's choices, and whether a choice is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from kvrelay.wire.worker_info import WorkerRole

_SAME_PLACE_TOKENS = 16
"""The most tokens between two failed forwards at the same place of a choice.

An attempt gains a token from its prefill worker in any case, and some from steps in flight.
"""
_WORKERS, _FORWARDS = 2, 3
"""The numbers of workers, or of forwards, that must fail with a choice before it is to blame.

In the last of them it must be alone.
"""


@dataclass(slots=True)
class _Blame:
    """The failed forwards of one choice in a row, at about the same place."""

    emitted: int = 0
    """The choice's tokens at the last failure."""
    workers: list[str] = field(default_factory=list)
    """The worker of each failed forward."""


class FailedForwards:
    """The search for a choice that breaks every forward, without harm to its neighbours.

    A forward that fails as a whole does not tell which request is to blame, or whether the worker
    is. So each choice is tried again, alone in its forwards, if possible on another worker.
    `max_attempts` does not count these failures. A choice is to blame if a forward fails with it
    alone, after one has failed on another worker. Without another worker, two must have failed
    before. By then the worker itself could have given up, after `failed_forwards_limit` failed
    forwards in a row.
    """

    def __init__(self) -> None:
        self._blames: dict[int, _Blame] = {}  # by choice
        self._suspected: dict[int, set[WorkerRole]] = {}  # by choice

    def suspect(self, choice: int, role: WorkerRole) -> None:
        """Note that a choice may break forwards on this role's workers: compute it alone there."""
        self._suspected.setdefault(choice, set()).add(role)

    def suspected_on(self, choices: Iterable[int]) -> Set[WorkerRole]:
        """The roles on whose workers one of these choices is suspected."""
        return {role for choice in choices for role in self._suspected.get(choice, ())}

    def add(self, choice: int, emitted: int, worker: str, *, alone: bool) -> bool:
        """Note a forward that failed with a choice; return whether the choice is to blame.

        `emitted` is the number of the choice's tokens; `worker` is an incarnation, or a stand-in
        for it.
        """
        blame = self._blames.setdefault(choice, _Blame())
        if emitted - blame.emitted > _SAME_PLACE_TOKENS:
            blame.workers.clear()
        blame.emitted = emitted
        blame.workers.append(worker)
        workers, forwards = len(set(blame.workers)), len(blame.workers)
        return alone and (workers >= _WORKERS or forwards >= _FORWARDS)
