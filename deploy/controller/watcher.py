"""What a worker's supervisor tells others of it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvrelay.deploy.controller.records.records import Started
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.wire.worker_info import WorkerInfo


class Watcher(Protocol):
    """Is told of every change of a worker, in the event loop."""

    def worker_starting(self, name: str, weights_read: float) -> None:
        """It has read this share of its weights, from 0 to 1."""
        ...

    async def worker_started(self, started: Started) -> None:
        """A new incarnation has started; it is live when this returns."""
        ...

    def worker_live(self, info: WorkerInfo) -> None:
        """This incarnation can be used from now on."""
        ...

    def worker_draining(self, info: WorkerInfo) -> None:
        """It takes no more requests, and its process will end."""
        ...

    def worker_lost(self, info: WorkerInfo) -> None:
        """It cannot be reached; its process may still run."""
        ...

    async def worker_dead(self, info: WorkerInfo, cause: WorkerEnd) -> None:
        """Its process has provably ended. Another one will run in its place, or none."""
        ...

    async def worker_removed(self, name: str) -> None:
        """It has left for good, and its actor is gone."""
        ...

    def turn_to_drain(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Wait until this worker may drain for a reason that can wait.

        It may while the context lasts: by its end it has said that it drains, or others may.
        """
        ...
