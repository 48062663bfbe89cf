"""Deaths that workers are told of, written down until all who must know have been told."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvrelay.deploy.controller.records.deaths import Deaths
from kvrelay.deploy.controller.records.journal import Journal


class RecordedDeaths:
    """`Deaths` that a successor of this controller knows, too. Belongs to one event loop.

    Args:
        journal: where they stand.
        earlier: those that stand there already: workers may have been told of them, or not.
    """

    def __init__(self, journal: Journal, earlier: Collection[str] = ()) -> None:
        self._journal = journal
        self._earlier = frozenset(earlier)
        self._deaths = Deaths()
        self._recorded: set[str] = set()
        self._striking: set[asyncio.Task[None]] = set()

    def was_known(self, incarnation: str) -> bool:
        """Whether a controller before this one has found that it is dead."""
        return incarnation in self._earlier

    def add_worker(self, worker: str) -> None:
        """A worker lives: it is to be told of all deaths from now on."""
        self._deaths.add_worker(worker)

    async def add_death(self, dead: str) -> None:
        """A worker's process has ended; returns when a successor would know."""
        await self._journal.add_death(dead)
        self._add(dead)

    def add_earlier(self) -> None:
        """All workers that live are to be told of the earlier deaths; perhaps again."""
        for dead in self._earlier:
            self._add(dead)

    def untold(self, worker: str) -> Sequence[str]:
        """The dead that a worker has not been told of, the oldest first."""
        return self._deaths.untold(worker)

    def told(self, worker: str, dead: Sequence[str]) -> None:
        """A worker has been told of these; it may have died meanwhile."""
        self._deaths.told(worker, dead)
        self._strike_out()

    def _add(self, dead: str) -> None:
        self._recorded.add(dead)
        self._deaths.add_death(dead)
        self._strike_out()

    def _strike_out(self) -> None:
        """Forget deaths that nobody is to be told of any more."""
        told = {dead for dead in self._recorded if self._deaths.is_told(dead)}
        self._recorded -= told
        for dead in told:
            striking = asyncio.create_task(self._journal.remove_death(dead))
            self._striking.add(striking)
            striking.add_done_callback(self._striking.discard)
