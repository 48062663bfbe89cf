"""Deaths that workers are told of, recorded until all who must know have been told."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvrelay.deploy.controller.records.deaths import Deaths
from kvrelay.deploy.controller.records.journal import Journal


class RecordedDeaths:
    """`Deaths` that a successor of this controller also knows. Belongs to one event loop.

    Args:
        journal: the journal in which they are recorded.
        earlier: the deaths that are recorded already; workers may have been told of them, or not.
    """

    def __init__(self, journal: Journal, earlier: Collection[str] = ()) -> None:
        self._journal = journal
        self._earlier = frozenset(earlier)
        self._deaths = Deaths()
        self._recorded: set[str] = set()
        self._striking: set[asyncio.Task[None]] = set()

    def was_known(self, incarnation: str) -> bool:
        """Return whether an earlier controller has found this incarnation dead."""
        return incarnation in self._earlier

    def add_worker(self, worker: str) -> None:
        """Let a worker be told of all deaths from now on."""
        self._deaths.add_worker(worker)

    async def add_death(self, dead: str) -> None:
        """Record that a worker's process has ended; return when a successor would know it."""
        await self._journal.add_death(dead)
        self._add(dead)

    def add_earlier(self) -> None:
        """Let all live workers be told of the earlier deaths, perhaps again."""
        for dead in self._earlier:
            self._add(dead)

    def untold(self, worker: str) -> Sequence[str]:
        """Return the dead that a worker has not been told of, the oldest first."""
        return self._deaths.untold(worker)

    def told(self, worker: str, dead: Sequence[str]) -> None:
        """Note that a worker, which may have died meanwhile, has been told of these."""
        self._deaths.told(worker, dead)
        self._strike_out()

    def _add(self, dead: str) -> None:
        self._recorded.add(dead)
        self._deaths.add_death(dead)
        self._strike_out()

    def _strike_out(self) -> None:
        """Remove deaths from the journal of which every worker has been told."""
        told = {dead for dead in self._recorded if self._deaths.is_told(dead)}
        self._recorded -= told
        for dead in told:
            striking = asyncio.create_task(self._journal.remove_death(dead))
            self._striking.add(striking)
            striking.add_done_callback(self._striking.discard)
