"""Keeps one worker running, and says which incarnation of it there is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

from kvrelay.deploy.bounded_waits import Pauses, is_done_within
from kvrelay.deploy.controller.incarnation import Incarnation
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.records import Started, WorkerRecord
from kvrelay.deploy.controller.watcher import Watcher
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.start_bound import start_seconds
from kvrelay.deploy.nodes.worker_actor import WorkerActor, reason_of
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.deploy.nodes.worker_process import WorkerProcess
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import Fault
from kvrelay.wire.worker_info import WorkerInfo

_log = logging.getLogger(__name__)
_STOP_SECONDS: Final = 10.0
_PROGRESS_SECONDS: Final = 1.0
"""Between two reports of a worker that starts."""


class WorkerSupervisor:
    """Starts a worker's actor, then replaces the worker whenever it dies, until it is stopped.

    A process that ends is noticed by the system's word (`WorkerProcess`), or by a call that lasts
    as long as the process (`watch`); one that runs but does not answer is noticed by the worker's
    heartbeat, and killed.

    Args:
        config: what the worker is to be, in every incarnation. A heartbeat is asked for three
            times within its `worker_timeout`.
        placement: where Ray is to place the actor and what it takes there.
        log_level: of the worker's process.
        leases: the worker's is renewed as long as it answers.
        watcher: is told of every change.
    """

    def __init__(
        self,
        config: WorkerConfig,
        placement: dict[str, Any],
        log_level: int,
        leases: Leases,
        watcher: Watcher,
    ) -> None:
        self.name = config.name
        self.role = config.role
        self.removing = False
        """No other incarnation follows this one."""
        self._timeout = config.worker_timeout
        self._start_seconds = start_seconds(config)
        self._leases = leases
        self._watcher = watcher
        self._actor = WorkerActor(config, placement, log_level)
        self._life: Incarnation | None = None
        self._following: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self, check: Callable[[WorkerInfo], None] = lambda info: None) -> WorkerInfo:
        """Start the worker's first incarnation and begin to follow it.

        Raises ClusterError, in one line, if it does not start, or not in time: what stops the
        first one would stop every other, so it is not tried again.

        Args:
            check: raises ClusterError if it is not to be, before anybody knows of it.
        """
        started = await self._first_start()
        check(started.info)
        life = self._begin(started)
        await self._watcher.worker_started(started)
        self._watcher.worker_live(life.info)
        self._go_on(self._follow(life))
        return life.info

    async def adopt(self, record: WorkerRecord, *, dead: bool) -> None:
        """Go on with the worker that another controller has started, and begin to follow it.

        Returns when it has answered, or has not in time: then it is lost, and followed as such.

        Args:
            record: of the worker, with its incarnation.
            dead: the incarnation's process is known to have ended.
        """
        assert record.started is not None
        life = self._begin(record.started)
        self.removing = record.removing
        answers = not dead and await life.answers()
        self._watcher.worker_live(life.info)
        if record.draining:
            self._watcher.worker_draining(life.info)
        if not answers:
            self._watcher.worker_lost(life.info)
            _log.warning("%s was not found by the new controller", life.info.incarnation)
        self._go_on(self._follow(life, lost=not answers, dead=dead, drains=record.draining))

    def tell_of_deaths(self, incarnations: Sequence[str], on_told: Callable[[], None]) -> None:
        """Tell the worker that other workers' processes have ended; does not wait.

        Args:
            incarnations: the others'.
            on_told: called when the worker has understood; a worker that cannot be reached has
                not.
        """
        telling = asyncio.create_task(self._tell(incarnations, on_told))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def drain(self, *, remove: bool) -> None:
        """Begin to drain the worker, whose process then ends; the watcher is told.

        To drain one that drains already changes nothing, except that it can still be removed.
        Raises ClusterError if the worker cannot be told.

        Args:
            remove: no other incarnation follows.
        """
        assert self._life is not None
        before, self.removing = self.removing, self.removing or remove
        try:
            await self._life.drain()
        except BaseException as error:
            self.removing = before
            if not isinstance(error, ray.exceptions.RayError):
                raise
            unreachable = isinstance(error, ray.exceptions.ActorUnavailableError)
            why = "it cannot be reached" if unreachable else reason_of(error)
            raise ClusterError(f"{self.name} could not be told: {why}") from error

    async def arm(self, faults: Sequence[Fault]) -> None:
        """Inject these faults into the worker's present incarnation; see `WorkerHost.arm`."""
        await self._actor.call(WorkerHost.arm, faults)

    async def faults_fired(self) -> int:
        """How many of the faults that were armed last have happened."""
        return await self._actor.call(WorkerHost.faults_fired)

    async def stop(self) -> None:
        """End the worker, in good order if it can, and its actor for good.

        Its process has ended then, so its ports are free.
        """
        tasks = [*self._telling, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process = await self._stop_process()
        self._actor.remove()
        if process is not None:
            await process.end(_STOP_SECONDS)
        if self._life is not None:
            await self._life.end(_STOP_SECONDS)

    async def _stop_process(self) -> WorkerProcess | None:
        """Stop the worker in good order; returns its process, in which it may still start.

        None: no process answers, or it cannot be observed from here.
        """
        process = None
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_STOP_SECONDS):
                identity = await self._actor.call(WorkerHost.process)
                process = None if identity is None else WorkerProcess.find(identity)
                await self._actor.call(WorkerHost.stop)
        return process

    async def _first_start(self) -> Started:
        starting = asyncio.create_task(self._actor.call(WorkerHost.start))
        try:
            async with self._reporting_progress():
                if await is_done_within(starting, self._start_seconds):
                    return starting.result()
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{self.name} did not start: {self._actor.why(error)}") from error
        finally:
            starting.cancel()
        seconds = f"{self._start_seconds:.0f} s"
        raise ClusterError(f"{self.name} did not start within {seconds}: raise --start-timeout")

    async def _tell(self, incarnations: Sequence[str], on_told: Callable[[], None]) -> None:
        try:
            await self._actor.call(WorkerHost.peers_died, incarnations)
            on_told()
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError) as error:
            # The worker is about to be found lost; it is told when it is live again.
            _log.info("%s was not told of %s: %s", self.name, incarnations, reason_of(error))
        except ray.exceptions.RayError as error:
            reason = reason_of(error)
            _log.error("%s failed on the death of %s: %s", self.name, incarnations, reason)

    def _go_on(self, following: Coroutine[Any, Any, None]) -> None:
        self._following = asyncio.create_task(following)
        self._following.add_done_callback(self._log_failure)

    async def _follow(
        self,
        life: Incarnation,
        *,
        lost: bool = False,
        dead: bool = False,
        drains: bool = False,
    ) -> None:
        """Replace one incarnation after the other, for as long as the supervisor runs.

        Args:
            life: the first one.
            lost: it is known to be.
            dead: its process is known to have ended.
            drains: it was to be told to, and perhaps was not.
        """
        pauses = Pauses()
        while True:
            if drains and not lost:
                with contextlib.suppress(ClusterError):
                    await self.drain(remove=self.removing)
            if not lost:
                reason = await life.lost()
                self._watcher.worker_lost(life.info)
                _log.warning("%s is lost: %s", life.info.incarnation, reason)
            lost = False
            if dead or await life.has_died():
                dead = drains = False
                await self._watcher.worker_dead(life.info, life.cause)
                if self.removing:
                    life.close()
                    self._actor.remove()
                    await self._watcher.worker_removed(self.name)
                    return
                await life.until_ray_knows()
                await pauses.pause()
                life.close()
                life = await self._restart(life.info)
            else:
                await pauses.pause()
            self._watcher.worker_live(life.info)
            _log.warning("%s is up", life.info.incarnation)

    async def _restart(self, dead: WorkerInfo) -> Incarnation:
        """Start the worker in its next process, as often as it takes.

        One whose lease is over is dead to all others, so it is not taken back if it answers.
        """
        await self._actor.ask_who_it_is(seconds=self._timeout)
        restart = WorkerHost.restart
        async with self._reporting_progress():
            while True:
                seconds = self._start_seconds
                started = await self._actor.call_until_answered(restart, seconds=seconds)
                if started.info != dead:
                    life = self._begin(started)
                    await self._watcher.worker_started(started)
                    return life
                self._actor.restart()

    @contextlib.asynccontextmanager
    async def _reporting_progress(self) -> AsyncIterator[None]:
        """Tell the watcher how much of its weights the worker has read, while the context lasts."""
        reporting = asyncio.create_task(self._report_progress())
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            with contextlib.suppress(ray.exceptions.RayError):
                share = await self._actor.call(WorkerHost.weights_read)
                self._watcher.worker_starting(self.name, share)

    def _begin(self, started: Started) -> Incarnation:
        self._life = Incarnation(started, self._actor, self._timeout, self._leases, self._watcher)
        return self._life

    def _log_failure(self, following: asyncio.Task[None]) -> None:
        """Log that the worker is not restarted any more, if that is so: it must never be."""
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.critical("%s is no longer supervised", self.name, exc_info=error)
