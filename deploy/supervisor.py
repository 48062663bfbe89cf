"""Keeps one worker running, and says which incarnation of it there is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.local_ray import ray
from kvrelay.deploy.pauses import Pauses
from kvrelay.deploy.worker_actor import WorkerActor, reason_of
from kvrelay.deploy.worker_host import WorkerHost
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import Fault
from kvrelay.wire.worker_info import WorkerInfo

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STOP_SECONDS: Final = 10.0


class Watcher(Protocol):
    """Is told of every change of a worker, in the event loop."""

    def worker_live(self, info: WorkerInfo) -> None:
        """This incarnation can be used from now on."""
        ...

    def worker_draining(self, info: WorkerInfo) -> None:
        """It takes no more requests, and its process will end."""
        ...

    def worker_lost(self, info: WorkerInfo) -> None:
        """It cannot be reached; its process may still run."""
        ...

    def worker_dead(self, info: WorkerInfo) -> None:
        """Its process has ended: another one runs in its place, or none will."""
        ...


class WorkerSupervisor:
    """Starts a worker's actor, then replaces the worker whenever it dies, until it is stopped.

    A process that ends is noticed by a call that lasts as long as the process (`watch`); one that
    runs but does not answer is noticed by the worker's heartbeat, and killed.

    Args:
        config: what the worker is to be, in every incarnation. A heartbeat is asked for three
            times within its `worker_timeout`.
        placement: where Ray is to place the actor and what it takes there.
        log_level: of the worker's process.
        watcher: is told of every change.
    """

    def __init__(
        self,
        config: WorkerConfig,
        placement: dict[str, Any],
        log_level: int,
        watcher: Watcher,
    ) -> None:
        self.name = config.name
        self.role = config.role
        self.removing = False
        """No other incarnation follows this one."""
        self._config = config
        self._timeout = config.worker_timeout
        self._watcher = watcher
        self._actor = WorkerActor(config, placement, log_level)
        self._following: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerInfo:
        """Start the worker's first incarnation and begin to follow it.

        Raises ClusterError, in one line, if it does not start: what stops the first
        one would stop every other, so it is not tried again.
        """
        try:
            info = await self._actor.call(WorkerHost.start)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{self.name} did not start: {self._why(error)}") from error
        self._watcher.worker_live(info)
        self._following = asyncio.create_task(self._follow(info))
        self._following.add_done_callback(self._log_failure)
        return info

    def tell_of_deaths(self, incarnations: Sequence[str]) -> None:
        """Tell the worker that other workers' processes have ended; does not wait.

        A worker that cannot be reached does not learn of it; the watcher tells it when it is
        live again.
        """
        telling = asyncio.create_task(self._tell(incarnations))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def drain(self, *, remove: bool) -> None:
        """Begin to drain the worker, whose process then ends; the watcher is told.

        To drain one that drains already changes nothing, except that it can still be removed.
        Raises ClusterError if the worker cannot be told.

        Args:
            remove: no other incarnation follows.
        """
        before, self.removing = self.removing, self.removing or remove
        try:
            await self._actor.call(WorkerHost.drain)
        except ray.exceptions.RayActorError:
            pass  # it had nothing to finish, and ended before it could answer
        except ray.exceptions.RayError as error:
            self.removing = before
            raise ClusterError(f"{self.name} could not be told: {reason_of(error)}") from error

    async def arm(self, faults: Sequence[Fault]) -> None:
        """Inject these faults into the worker's present incarnation; see `WorkerHost.arm`."""
        await self._actor.call(WorkerHost.arm, faults)

    async def faults_fired(self) -> int:
        """How many of the faults that were armed last have happened."""
        return await self._actor.call(WorkerHost.faults_fired)

    async def stop(self) -> None:
        """End the worker, in good order if it can, and its actor for good."""
        tasks = [*self._telling, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._actor.call(WorkerHost.stop)
        self._actor.remove()

    async def _tell(self, incarnations: Sequence[str]) -> None:
        try:
            await self._actor.call(WorkerHost.peers_died, incarnations)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError) as error:
            # `watch` has ended for the same reason, so the worker is about to be found lost.
            _log.info("%s was not told of %s: %s", self.name, incarnations, reason_of(error))
        except ray.exceptions.RayError as error:
            reason = reason_of(error)
            _log.error("%s failed on the death of %s: %s", self.name, incarnations, reason)

    async def _follow(self, info: WorkerInfo) -> None:
        """Replace one incarnation after the other, for as long as the supervisor runs."""
        pauses = Pauses()
        while True:
            reason = await self._lost(info)
            self._watcher.worker_lost(info)
            _log.warning("%s is lost: %s", info.incarnation, reason)
            await pauses.pause()
            # To say who it is takes a process no time, to start a worker as long as its weights.
            if await self._call_until_answered(WorkerHost.current, seconds=self._timeout) != info:
                self._watcher.worker_dead(info)
                if self.removing:
                    self._actor.remove()
                    return
                info = await self._call_until_answered(WorkerHost.restart, seconds=None)
            self._watcher.worker_live(info)
            _log.warning("%s is up", info.incarnation)

    async def _lost(self, info: WorkerInfo) -> str:
        """Wait until the incarnation's process has ended, is not reachable, or was killed.

        Returns the reason.
        """
        signs = [
            asyncio.create_task(self._process_ended(info)),
            asyncio.create_task(self._heartbeat_failed()),
        ]
        drain = asyncio.create_task(self._notice_drain(info))
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            return next(sign.result() for sign in signs if sign.done())
        finally:
            for task in (*signs, drain):
                task.cancel()
            await asyncio.gather(*signs, drain, return_exceptions=True)

    async def _notice_drain(self, info: WorkerInfo) -> None:
        """Tell the watcher when the worker drains, for whatever reason."""
        with contextlib.suppress(ray.exceptions.RayError):
            if await self._actor.call(WorkerHost.draining, info.incarnation):
                self._watcher.worker_draining(info)

    async def _heartbeat_failed(self) -> str:
        """Wait until the worker does not answer any more, and kill its process then.

        Ray ends a process that was stopped, too. Returns the reason.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._actor.call(WorkerHost.heartbeat)
            except TimeoutError:
                self._actor.restart()
                return f"it has not answered for {self._timeout:g} s, so it is killed"
            except ray.exceptions.RayError as error:
                return reason_of(error)
            await asyncio.sleep(self._timeout / 3)

    async def _process_ended(self, info: WorkerInfo) -> str:
        """Wait until the incarnation's process has ended; returns the reason."""
        try:
            await self._actor.call(WorkerHost.watch, info.incarnation)
        except ray.exceptions.RayError as error:
            return reason_of(error)
        return "another process has taken its place"

    async def _call_until_answered(
        self, method: Callable[[WorkerHost], Coroutine[Any, Any, T]], *, seconds: float | None
    ) -> T:
        """Call the actor until it answers, in whatever process.

        The worker has started before with this configuration, so what fails now is taken to
        pass: it is tried again, in a fresh process, after ever longer pauses.

        Args:
            method: is called without arguments.
            seconds: after which a process that has not answered is killed; twice as many for
                each one after it, because one that still imports its modules does not hang.
        """
        pauses = Pauses()
        while True:
            try:
                async with asyncio.timeout(seconds):
                    return await self._actor.call(method)
            except TimeoutError:
                _log.error("%s does not answer, so it is killed", self.name)
                self._actor.restart()
                seconds = 2 * seconds if seconds is not None else None
            except ray.exceptions.ActorUnavailableError:
                _log.info("%s cannot be reached yet", self.name)
            except ray.exceptions.ActorDiedError as error:
                _log.error("Ray gave %s up: %s", self.name, reason_of(error))
                self._actor.place_again()
            except ray.exceptions.RayError as error:
                _log.error("%s did not restart: %s", self.name, self._why(error))
                self._actor.restart()
            await pauses.pause()

    def _why(self, error: Exception) -> str:
        """Why the worker did not start, in one line."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            # Its gRPC port is any free one.
            return f"--metrics: port {self._config.metrics_port} is in use"
        return reason_of(error)

    def _log_failure(self, following: asyncio.Task[None]) -> None:
        """Log that the worker is not restarted any more, if that is so: it must never be."""
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.critical("%s is no longer supervised", self.name, exc_info=error)
