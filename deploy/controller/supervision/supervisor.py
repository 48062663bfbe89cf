"""The supervision of one worker: it is kept running, and its present incarnation is reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

from kvrelay.deploy.bounded_waits import Pauses, is_done_within
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.controller.supervision.incarnation import Incarnation
from kvrelay.deploy.controller.supervision.watcher import Watcher
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_actor import WorkerActor, reason_of
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_host import WorkerHost
from kvrelay.deploy.nodes.worker_process import WorkerProcess
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.weights_read import weight_bytes
from kvrelay.wire.worker_info import WorkerInfo

_log = logging.getLogger(__name__)
_STOP_SECONDS: Final = 10.0
_PROGRESS_SECONDS: Final = 1.0
"""The time between two reports of a starting worker's progress."""
_MOST_FAILED_STARTS: Final = 3
"""The starts of a successor that fail before nobody is to wait for it any more."""
_IMPORT_SECONDS: Final = 60.0
"""The least time for a new process to answer: it may import torch from a slow disk first."""
SLOWEST_BYTES_PER_SECOND: Final = 50e6
"""The lowest rate at which a usable disk reads weights."""


class WorkerSupervisor:
    """The supervisor of one worker: it starts the actor, and replaces the worker whenever it dies.

    It notices the end of a process from the system (`WorkerProcess`), or from a call that lasts as
    long as the process (`watch`). A process that runs without answering misses heartbeats, and is
    killed.

    Args:
        config: the worker's configuration in every incarnation. Three heartbeats are requested
            within its `worker_timeout`.
        placement: Ray's options: where the actor runs and which resources it takes there.
        log_level: the level of the worker's log.
        leases: the controller's leases; the worker's is renewed as long as it answers.
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
        """Whether no other incarnation follows this one."""
        self._silence_seconds = config.worker_timeout
        self._timeout = max(config.worker_timeout, _IMPORT_SECONDS)
        """The seconds in which a new process answers first."""
        self._leases = leases
        self._watcher = watcher
        self._actor = WorkerActor(config, placement, log_level)
        self.start_seconds = start_seconds(self._actor.config)
        """The time for a start, on the GPU that the worker may share."""
        self._life: Incarnation | None = None
        self._is_lost = False
        self._is_to_drain = False
        """Whether the present incarnation is to be told to drain, if it is not lost after all."""
        self._following: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self, check: Callable[[WorkerInfo], None] = lambda info: None) -> WorkerInfo:
        """Start the worker's first incarnation and begin to follow it.

        Raises ClusterError, in one line, if it does not start in time. There is no second attempt:
        the same cause would stop every other incarnation.

        Args:
            check: raises ClusterError to refuse the worker before it is made known.
        """
        started = await self._first_start()
        check(started.info)
        life = self._begin(started)
        await self._watcher.worker_started(started)
        self._watcher.worker_live(life.info)
        self._go_on(self._follow(life))
        return life.info

    async def adopt(self, record: WorkerRecord, *, dead: bool) -> None:
        """Take over the worker that another controller has started, and begin to follow it.

        Returns when it has answered, or when its time is over: then it is lost, and followed as
        such.

        Args:
            record: the worker's record, with its incarnation.
            dead: whether the incarnation's process is known to have ended.
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
        """Tell the worker that other workers serve no more; do not wait.

        Args:
            incarnations: the incarnations whose end was proved.
            on_told: is called when the worker has acknowledged it.
        """
        telling = asyncio.create_task(self._tell(incarnations, on_told))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def begin_drain(self, *, remove: bool) -> None:
        """Begin to drain the worker, whose process then ends; the watcher is told.

        A second drain changes nothing, except that the worker can still be removed. A worker that
        is lost meanwhile needs no telling, as the drain or the removal goes on by itself. Raises
        ClusterError if the call fails.

        Args:
            remove: whether no other incarnation is to follow.
        """
        assert self._life is not None
        before, self.removing = self.removing, self.removing or remove
        try:
            await self._life.tell_to_drain()
        except BaseException as error:
            if self._is_lost and isinstance(error, ray.exceptions.RayError):
                self._is_to_drain = True
                return
            self.removing = before
            if not isinstance(error, ray.exceptions.RayError):
                raise
            unreachable = isinstance(error, ray.exceptions.ActorUnavailableError)
            why = "it cannot be reached" if unreachable else reason_of(error)
            raise ClusterError(f"{self.name} could not be told: {why}") from error

    async def stop(self) -> None:
        """End the worker, in good order if it can, and its actor for good.

        When it returns, the process has ended, so its ports are free.
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
        """Stop the worker in good order; return its process, in which it may still be starting.

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
                if await is_done_within(starting, self.start_seconds):
                    return starting.result()
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{self.name} did not start: {self._actor.why(error)}") from error
        finally:
            starting.cancel()
        seconds = f"{self.start_seconds:.0f} s"
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
            lost: whether it is known to be lost.
            dead: whether its process is known to have ended.
            drains: whether it was to be told to drain, and perhaps was not.
        """
        pauses, reason = Pauses(), ""
        self._is_lost, self._is_to_drain = lost, drains
        while True:
            if self._is_to_drain and not lost:
                with contextlib.suppress(ClusterError):
                    await self.begin_drain(remove=self.removing)
            if not lost:
                reason = await life.lost()
                self._is_lost = True
                self._watcher.worker_lost(life.info)
                _log.warning("%s is lost: %s", life.info.incarnation, reason)
            lost = False
            if dead or await life.has_died():
                dead = self._is_to_drain = False
                await self._watcher.worker_dead(life.info, life.cause)
                if self.removing:
                    life.close()
                    self._actor.remove()
                    await self._watcher.worker_removed(self.name)
                    return
                await life.until_ray_knows()
                if life.cause is not WorkerEnd.DRAINED:
                    self._watcher.worker_ended(self.name, await life.why(reason))
                await pauses.pause()
                life.close()
                life = await self._restart(life.info)
            else:
                await pauses.pause()
            self._is_lost = False
            self._watcher.worker_live(life.info)
            _log.info("%s is up", life.info.incarnation)

    async def _restart(self, dead: WorkerInfo) -> Incarnation:
        """Start the worker in its next process, however many attempts it takes.

        An incarnation whose lease is over is dead to all others, so it is not taken back if it
        answers.
        """
        failed = 0

        def count_failure() -> None:
            nonlocal failed
            failed += 1
            if failed == _MOST_FAILED_STARTS:
                self._watcher.worker_fails_to_start(dead)

        await self._actor.ask_who_it_is(seconds=self._timeout, on_failure=count_failure)
        restart = WorkerHost.restart
        async with self._reporting_progress():
            while True:
                seconds = self.start_seconds
                started = await self._actor.call_until_answered(
                    restart, seconds=seconds, on_failure=count_failure
                )
                if started.info != dead:
                    life = self._begin(started)
                    await self._watcher.worker_started(started)
                    return life
                self._actor.restart()

    @contextlib.asynccontextmanager
    async def _reporting_progress(self) -> AsyncIterator[None]:
        """Tell the watcher the worker's share of weights read, while the context lasts."""
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
        self._life = Incarnation(
            started, self._actor, self._silence_seconds, self._leases, self._watcher
        )
        return self._life

    def _log_failure(self, following: asyncio.Task[None]) -> None:
        """Log, as critical, that the worker is no longer supervised, unless that was requested."""
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.critical("%s is no longer supervised", self.name, exc_info=error)


def start_seconds(config: WorkerConfig) -> float:
    """Return the time for a start: the option, plus reading all weights at that rate.

    Workers that share a GPU load one after the other, so the last may take as long as all of them.
    """
    alone = config.start_timeout + weight_bytes(config) / SLOWEST_BYTES_PER_SECOND
    return alone * math.ceil(1 / config.gpu_part)
