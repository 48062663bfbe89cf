"""The interface by which a worker's supervisor reports changes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.wire.worker_info import WorkerInfo


class Watcher(Protocol):
    """The receiver of every change of a worker, in the event loop."""

    def worker_starting(self, name: str, weights_read: float) -> None:
        """Report that the worker has read this share of its weights, from 0 to 1."""
        ...

    async def worker_started(self, started: Started) -> None:
        """Report that a new incarnation has started; it is live when this returns."""
        ...

    def worker_live(self, info: WorkerInfo) -> None:
        """Report that this incarnation can be used from now on."""
        ...

    def worker_draining(self, info: WorkerInfo) -> None:
        """Report that the incarnation takes no more requests, and that its process will end."""
        ...

    def worker_lost(self, info: WorkerInfo) -> None:
        """Report that the incarnation cannot be reached; its process may still run."""
        ...

    async def worker_dead(self, info: WorkerInfo, cause: WorkerEnd) -> None:
        """Report that its process has provably ended; another one may follow in its place."""
        ...

    def worker_ended(self, name: str, why: str) -> None:
        """Report why the worker's latest incarnation has ended, unless it had drained."""
        ...

    def worker_fails_to_start(self, info: WorkerInfo) -> None:
        """Report that the incarnation's successor has failed to start several times."""
        ...

    async def worker_removed(self, name: str) -> None:
        """Report that the worker has left for good, and that its actor is gone."""
        ...

    def turn_to_drain(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Wait until this worker may drain for a reason that can wait.

        The permission lasts as long as the context. If the worker has not reported by then that it
        drains, another one may.
        """
        ...
