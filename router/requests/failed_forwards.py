"""Which choices of a request were in forwards that failed, and whether one of them is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Final

from kvrelay.wire.output import FailureReason
from kvrelay.wire.worker_info import WorkerRole

FORWARD_FAILURES: Final = {FailureReason.FORWARD_FAILED, FailureReason.FORWARD_FAILED_ALONE}
_SAME_PLACE_TOKENS = 16
"""A choice that has gained more tokens since a forward failed with it has passed that place. An
attempt gains a token from its prefill worker in any case, and some from steps in flight."""
_WORKERS, _FORWARDS = 2, 3
"""So many workers, or forwards, must have failed with a choice, the last of them with it alone."""


@dataclass(slots=True)
class _Blame:
    """What failed with one choice, one time after the other at about the same place."""

    emitted: int = 0
    """Its tokens at the last of them."""
    workers: list[str] = field(default_factory=list)
    """One for each forward."""


class FailedForwards:
    """Finds the choice that breaks the forward wherever it goes, and spares its neighbours.

    A forward that fails as a whole says nothing of the requests in it: one of them may be
    to blame, or the worker. So each is tried again, alone in its forwards and if possible
    elsewhere, and that is none of the failures that `max_attempts` bounds. A choice is to
    blame if a forward fails with it alone, after one failed on another worker; where there
    is no other, after two. Until then the worker itself has had the chance to give up,
    after `failed_forwards_limit` of them in a row.
    """

    def __init__(self) -> None:
        self._blames: dict[int, _Blame] = {}  # by choice
        self._suspected: dict[int, set[WorkerRole]] = {}  # by choice

    def suspect(self, choice: int, role: WorkerRole) -> None:
        """A choice may break forwards on workers of this role: it is to be computed alone there."""
        self._suspected.setdefault(choice, set()).add(role)

    def suspected_on(self, choices: Iterable[int]) -> Set[WorkerRole]:
        """The roles on whose workers one of these choices is suspected."""
        return {role for choice in choices for role in self._suspected.get(choice, ())}

    def add(self, choice: int, emitted: int, worker: str, *, alone: bool) -> bool:
        """A forward has failed with a choice that had so many tokens; whether it is to blame.

        `worker` is its incarnation, or anything that stands for it.
        """
        blame = self._blames.setdefault(choice, _Blame())
        if emitted - blame.emitted > _SAME_PLACE_TOKENS:
            blame.workers.clear()
        blame.emitted = emitted
        blame.workers.append(worker)
        workers, forwards = len(set(blame.workers)), len(blame.workers)
        return alone and (workers >= _WORKERS or forwards >= _FORWARDS)
