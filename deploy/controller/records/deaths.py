"""Which deaths the living workers are still to be told of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Deaths:
    """Keeps a death until every worker that lived at that time has been told, or has died, too.

    A worker that starts later shares nothing with the dead, so it need not be told. Workers are
    named by incarnation.
    """

    def __init__(self) -> None:
        self._untold: dict[str, dict[str, None]] = {}
        """For each living worker, the dead that it has not been told of, the oldest first."""

    def add_worker(self, worker: str) -> None:
        """A worker lives: it is told of all deaths from now on."""
        self._untold.setdefault(worker, {})

    def add_death(self, dead: str) -> None:
        """A worker's process has ended."""
        self._untold.pop(dead, None)
        for untold in self._untold.values():
            untold[dead] = None

    def untold(self, worker: str) -> Sequence[str]:
        """The dead that a worker has not been told of, the oldest first."""
        return tuple(self._untold.get(worker, ()))

    def told(self, worker: str, dead: Iterable[str]) -> None:
        """A worker has been told of these; it may have died meanwhile."""
        untold = self._untold.get(worker, {})
        for one in dead:
            untold.pop(one, None)

    def is_told(self, dead: str) -> bool:
        """Whether nobody is still to be told of this one."""
        return not any(dead in untold for untold in self._untold.values())

    def __len__(self) -> int:
        """How many times somebody is still to be told of somebody."""
        return sum(map(len, self._untold.values()))
