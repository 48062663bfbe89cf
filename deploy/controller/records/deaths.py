"""The deaths of workers that living workers are still to be told of, and the records of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvrelay.deploy.controller.records.journal import Journal


class Deaths:
    """The deaths that some workers do not know of, which a successor of this controller finds.

    A death is kept until every worker that lived at that time has been told of it, or has died as
    well. A worker that starts later shares nothing with the dead, so it need not be told. Workers
    are named by incarnation. Belongs to one event loop.

    Args:
        journal: the journal in which they are recorded.
        earlier: the deaths that are recorded already; workers may have been told of them, or not.
    """

    def __init__(self, journal: Journal, earlier: Collection[str] = ()) -> None:
        self._journal = journal
        self._earlier = frozenset(earlier)
        self._untold: dict[str, dict[str, None]] = {}
        """For each living worker, the dead that it has not been told of, the oldest first."""
        self._recorded: set[str] = set()
        self._striking: set[asyncio.Task[None]] = set()

    def was_known(self, incarnation: str) -> bool:
        """Return whether an earlier controller has found this incarnation dead."""
        return incarnation in self._earlier

    def add_worker(self, worker: str) -> None:
        """Begin to keep all later deaths for this worker."""
        self._untold.setdefault(worker, {})

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
        return tuple(self._untold.get(worker, ()))

    def told(self, worker: str, dead: Sequence[str]) -> None:
        """Note that a worker, which may have died meanwhile, has been told of these."""
        untold = self._untold.get(worker, {})
        for one in dead:
            untold.pop(one, None)
        self._strike_out()

    def _add(self, dead: str) -> None:
        self._recorded.add(dead)
        self._untold.pop(dead, None)
        for untold in self._untold.values():
            untold[dead] = None
        self._strike_out()

    def _strike_out(self) -> None:
        """Remove deaths from the journal of which every worker has been told."""
        told = self._recorded.difference(*self._untold.values())
        self._recorded -= told
        for dead in told:
            striking = asyncio.create_task(self._journal.remove_death(dead))
            self._striking.add(striking)
            striking.add_done_callback(self._striking.discard)
