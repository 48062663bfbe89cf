"""The deaths of workers that living workers are still to be told of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Deaths:
    """The deaths that some workers do not know of.

    A death is kept until every worker that lived at that time has been told of it, or has died as
    well.

    A worker that starts later shares nothing with the dead, so it need not be told. Workers are
    named by incarnation.
    """

    def __init__(self) -> None:
        self._untold: dict[str, dict[str, None]] = {}
        """For each living worker, the dead that it has not been told of, the oldest first."""

    def add_worker(self, worker: str) -> None:
        """Begin to keep all later deaths for this worker."""
        self._untold.setdefault(worker, {})

    def add_death(self, dead: str) -> None:
        """Add the death of a worker, whose process has ended."""
        self._untold.pop(dead, None)
        for untold in self._untold.values():
            untold[dead] = None

    def untold(self, worker: str) -> Sequence[str]:
        """Return the dead that a worker has not been told of, the oldest first."""
        return tuple(self._untold.get(worker, ()))

    def told(self, worker: str, dead: Iterable[str]) -> None:
        """Note that a worker, which may have died meanwhile, has been told of these."""
        untold = self._untold.get(worker, {})
        for one in dead:
            untold.pop(one, None)

    def is_told(self, dead: str) -> bool:
        """Return whether every worker that had to know of this death has been told."""
        return not any(dead in untold for untold in self._untold.values())

    def __len__(self) -> int:
        """Return the number of pairs of a worker and a death that it is still to be told of."""
        return sum(map(len, self._untold.values()))
