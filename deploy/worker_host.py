"""The Ray actor that a worker lives in."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from kvrelay.deploy.stop_signals import TermSignal
from kvrelay.engine.config import Role, WorkerConfig, WorkerInfo
from kvrelay.engine.faults import Fault, FaultPlan

_log = logging.getLogger(__name__)
_ENGINE_DIED = 70
_DRAINED = 71
"""Exit statuses; to Ray any but its own counts as a crash, and is followed by a restart."""


class Worker(Protocol):
    """What `build` of a role's room returns."""

    async def start(self) -> WorkerInfo:
        """Load, register and listen."""

    async def stop(self) -> None:
        """End every request and give everything back."""

    def drain(self) -> None:
        """Take no more requests, and finish or give back those that are here."""

    async def draining(self) -> None:
        """Return when it drains."""

    async def drained(self) -> None:
        """Return when it has drained."""

    async def failed(self) -> str:
        """Return the reason when the engine has died; until then, wait."""

    async def beat(self) -> None:
        """Return when the engine's loop and the transfer agent have answered."""

    async def peer_died(self, incarnation: str) -> None:
        """Learn, perhaps not for the first time, that another's process has ended."""

    @property
    def faults(self) -> FaultPlan:
        """What is to go wrong in it."""


class WorkerHost(ABC):
    """Hosts one worker. Ray makes a new one, in a new process, whenever one dies.

    Args:
        config: what the worker is to be.
        log_level: from here on its log goes to its standard error.
    """

    sigterm: ClassVar[TermSignal | None] = None
    """This process's; see `actor_class`."""

    def __init__(self, config: WorkerConfig, log_level: int) -> None:
        logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s")
        self._config = config
        self._worker: Worker | None = None
        self._info: WorkerInfo | None = None
        self._starting: asyncio.Task[WorkerInfo] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._heeding: asyncio.Task[None] | None = None
        self._stopping = False

    def __repr__(self) -> str:
        """Ray puts this before each line of the worker's log."""
        return self._config.name

    async def start(self) -> WorkerInfo:
        """Build and start the worker: once in a process, however often it is called.

        In the actor's constructor a failure would be a crash, which Ray repeats
        for ever; here it is an exception, and the supervisor decides.
        """
        if self._starting is None:
            self._heeding = asyncio.create_task(self._heed_sigterm())
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def current(self) -> WorkerInfo | None:
        """The worker that runs in this process, None in one that has not started its own."""
        return self._info

    async def watch(self, incarnation: str) -> None:
        """Wait for the end of this process, which ends the call with an error.

        Returns, and at once, only in a process that is not this incarnation's.
        """
        if self._info is not None and self._info.incarnation == incarnation:
            await asyncio.Event().wait()

    async def beat(self) -> None:
        """A sign of life of the engine and the transfer agent, not of this process alone."""
        if self._worker is not None:
            await self._worker.beat()

    async def drain(self) -> None:
        """Begin to drain the worker; the process ends when that is done, in good order.

        The same follows a SIGTERM.
        """
        if self._worker is not None:
            self._worker.drain()

    async def draining(self, incarnation: str) -> bool:
        """Wait until the worker drains, for whatever reason; false, and at once, in a process
        that is not this incarnation's.
        """
        if self._worker is None or self._info is None or self._info.incarnation != incarnation:
            return False
        await self._worker.draining()
        return True

    async def stop(self) -> None:
        """Stop the worker in good order; the process stays, for the supervisor to end."""
        self._stopping = True
        for task in (self._guard, self._leaving):
            if task is not None:
                task.cancel()
        if self._worker is not None:
            await self._worker.stop()

    async def restart(self) -> WorkerInfo:
        """As `start`, in a later life: what was to go wrong has gone wrong in the first."""
        if self._config.faults:
            self._config = dataclasses.replace(self._config, faults=())
        return await self.start()

    async def arm(self, faults: Sequence[Fault]) -> None:
        """Let these go wrong from now on, if the worker was started with ``--debug-faults``."""
        assert self._worker is not None
        self._worker.faults.arm(faults)

    async def faults_fired(self) -> int:
        """Of those armed last, how many have happened."""
        assert self._worker is not None
        return self._worker.faults.fired

    async def peers_died(self, incarnations: Sequence[str]) -> None:
        """Pass on that the processes of others' incarnations have ended; it may know already.

        Where no worker runs yet, there is nothing of theirs to let go of.
        """
        if self._worker is None:
            return
        for incarnation in incarnations:
            await self._worker.peer_died(incarnation)

    @abstractmethod
    def _build(self, config: WorkerConfig) -> Worker:
        """A worker of the role, not started yet."""

    async def _start(self) -> WorkerInfo:
        worker = self._build(self._config)
        self._info = await worker.start()
        self._worker = worker
        self._guard = asyncio.create_task(self._die_with_the_engine(worker))
        self._leaving = asyncio.create_task(self._leave_when_drained(worker))
        return self._info

    async def _heed_sigterm(self) -> None:
        """The first one drains a worker that serves; any other ends the process at once."""
        if self.sigterm is None:
            return
        await self.sigterm.heard()
        if self._worker is not None and not self._stopping:
            _log.warning("SIGTERM: the worker drains")
            self._worker.drain()
            await self.sigterm.heard()
        os._exit(128 + signal.SIGTERM)

    async def _leave_when_drained(self, worker: Worker) -> None:
        await worker.drained()
        if self._guard is not None:
            self._guard.cancel()
        await worker.stop()
        _log.warning("the worker has drained, so the process ends")
        logging.shutdown()
        os._exit(_DRAINED)

    async def _die_with_the_engine(self, worker: Worker) -> None:
        reason = await worker.failed()
        _log.critical("the engine has died, so the process ends too: %s", reason)
        logging.shutdown()
        os._exit(_ENGINE_DIED)


# The names of these classes are the titles of their processes. Each imports its
# role's room in its own process only: the driver needs neither.


class PrefillWorker(WorkerHost):
    """Hosts a prefill worker."""

    def _build(self, config: WorkerConfig) -> Worker:
        from kvrelay.prefill_worker.worker import build

        return build(config)


class DecodeWorker(WorkerHost):
    """Hosts a decode worker."""

    def _build(self, config: WorkerConfig) -> Worker:
        from kvrelay.decode_worker.worker import build

        return build(config)


class AggregatedWorker(WorkerHost):
    """Hosts a worker that does both."""

    def _build(self, config: WorkerConfig) -> Worker:
        from kvrelay.aggregated_worker.worker import build

        return build(config)


HOSTS: dict[Role, type[WorkerHost]] = {
    Role.PREFILL: PrefillWorker,
    Role.DECODE: DecodeWorker,
    Role.AGGREGATED: AggregatedWorker,
}


class _OnArrival:
    """Becomes a `TermSignal` in the process that it is sent to."""

    def __reduce__(self) -> tuple[type[TermSignal], tuple[()]]:
        return TermSignal, ()


def actor_class(role: Role) -> Any:
    """The role's host, for Ray to make its actor of.

    Ray makes an actor in another thread than the main one, where alone a signal
    can be taken; but it unpickles the actor's class there. So the signal comes
    with a class that is made here, and which is therefore pickled whole.
    """
    host = HOSTS[role]
    return type(host.__name__, (host,), {"__doc__": host.__doc__, "sigterm": _OnArrival()})
