"""Keeps one worker alive, and says which incarnation of it there is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.local_ray import ray
from kvrelay.deploy.worker_host import actor_class
from kvrelay.engine.config import WorkerConfig, WorkerInfo
from kvrelay.engine.faults import Fault

_log = logging.getLogger(__name__)
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_STOP_SECONDS = 10.0


class Watcher(Protocol):
    """Is told how a worker fares, in the event loop."""

    def worker_live(self, info: WorkerInfo) -> None:
        """This incarnation can be used from now on."""
        ...

    def worker_draining(self, info: WorkerInfo) -> None:
        """It takes no more requests, and is about to be lost."""
        ...

    def worker_lost(self, info: WorkerInfo) -> None:
        """It cannot be reached; it may yet be alive."""
        ...

    def worker_dead(self, info: WorkerInfo) -> None:
        """Its process has ended: another one runs in its place, or none will."""
        ...


class WorkerSupervisor:
    """Starts a worker's actor, then follows its lives until it is stopped.

    A call that lives as long as the worker's process tells of its end; a process
    that lives on but does not answer is found by its worker's heartbeat, and killed.

    Args:
        config: what the worker is to be, in every life.
        actor_options: where Ray is to place it and what it takes there.
        log_level: of the worker's process.
        timeout: seconds that the worker's engine may take to answer; it is asked
            three times as often.
        watcher: is told of every change.
    """

    def __init__(
        self,
        config: WorkerConfig,
        actor_options: dict[str, Any],
        log_level: int,
        timeout: float,
        watcher: Watcher,
    ) -> None:
        self.name = config.name
        self.role = config.role
        self._config = config
        self._actor_options = actor_options
        self._log_level = log_level
        self._timeout = timeout
        self._watcher = watcher
        self._actor = self._place()
        self.removing = False
        """After this life there is no other."""
        self._following: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def start(self) -> WorkerInfo:
        """Start the worker's first life and begin to follow it.

        Raises ClusterError, in one line, if it does not start: what stops the
        first life would stop every other, so it is not tried again.
        """
        try:
            info: WorkerInfo = await self._actor.start.remote()
        except ray.exceptions.RayError as error:
            raise ClusterError(f"{self.name} did not start: {self._why(error)}") from error
        self._watcher.worker_live(info)
        self._following = asyncio.create_task(self._follow(info))
        self._following.add_done_callback(self._say_if_failed)
        return info

    def tell_of_deaths(self, incarnations: Sequence[str]) -> None:
        """Let the worker know that others' processes have ended; does not wait.

        One that cannot be reached misses it, and is told again once it is live again.
        """
        telling = asyncio.create_task(self._tell(incarnations))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def drain(self, *, remove: bool) -> None:
        """Begin to drain the worker, which then leaves, as its watcher will hear.

        Raises ClusterError if it cannot be told. To drain one that drains already
        changes nothing, but that it can still be removed.

        Args:
            remove: no other life follows.
        """
        before, self.removing = self.removing, self.removing or remove
        try:
            await self._actor.drain.remote()
        except ray.exceptions.RayActorError:
            pass  # it had nothing to finish, and left before it could answer
        except ray.exceptions.RayError as error:
            self.removing = before
            raise ClusterError(f"{self.name} could not be told: {_reason(error)}") from error

    async def arm(self, faults: Sequence[Fault]) -> None:
        """Let these go wrong in the worker's present life; see `WorkerHost.arm`."""
        await self._actor.arm.remote(faults)

    async def faults_fired(self) -> int:
        """See `WorkerHost.faults_fired`."""
        fired: int = await self._actor.faults_fired.remote()
        return fired

    async def stop(self) -> None:
        """End the worker, in good order if it can, and its actor for good."""
        tasks = [*self._telling, *([self._following] if self._following else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._actor.stop.remote()
        ray.kill(self._actor)

    async def _tell(self, incarnations: Sequence[str]) -> None:
        try:
            await self._actor.peers_died.remote(incarnations)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError) as error:
            # `watch` has ended for the same reason, so the worker is about to be found lost.
            _log.info("%s was not told of %s: %s", self.name, incarnations, _reason(error))
        except ray.exceptions.RayError as error:
            _log.error("%s failed on the death of %s: %s", self.name, incarnations, _reason(error))

    async def _follow(self, info: WorkerInfo) -> None:
        pauses = _Pauses()
        while True:
            reason = await self._lost(info)
            self._watcher.worker_lost(info)
            _log.warning("%s is lost: %s", info.incarnation, reason)
            await pauses.pause()
            if await self._insist("current") != info:
                self._watcher.worker_dead(info)
                if self.removing:
                    ray.kill(self._actor)
                    return
                info = await self._insist("restart")
            self._watcher.worker_live(info)
            _log.warning("%s is up", info.incarnation)

    async def _lost(self, info: WorkerInfo) -> str:
        """Wait until the incarnation's process has ended, or cannot be reached, or is killed."""
        signs = [asyncio.create_task(self._gone(info)), asyncio.create_task(self._silent())]
        drain = asyncio.create_task(self._notice_drain(info))
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            return next(sign.result() for sign in signs if sign.done())
        finally:
            for task in (*signs, drain):
                task.cancel()
            await asyncio.gather(*signs, drain, return_exceptions=True)

    async def _notice_drain(self, info: WorkerInfo) -> None:
        """Pass on that it drains, whoever has told it to."""
        with contextlib.suppress(ray.exceptions.RayError):
            if await self._actor.draining.remote(info.incarnation):
                self._watcher.worker_draining(info)

    async def _silent(self) -> str:
        """Wait until the engine does not answer any more; then its process is killed.

        Ray lets it go at once, and ends one that has been stopped, too.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._actor.beat.remote()
            except TimeoutError:
                ray.kill(self._actor, no_restart=False)
                return f"it has not answered for {self._timeout:g} s, so it is killed"
            except ray.exceptions.RayError as error:
                return _reason(error)
            await asyncio.sleep(self._timeout / 3)

    async def _gone(self, info: WorkerInfo) -> str:
        try:
            await self._actor.watch.remote(info.incarnation)
        except ray.exceptions.RayError as error:
            return _reason(error)
        return "another process has taken its place"

    async def _insist(self, method: str) -> Any:
        """Call the actor until it answers, in whatever life.

        The worker has started before with this configuration, so what fails now
        is taken to pass: it is tried again, in a fresh process, ever less often.
        """
        pauses, patience = _Pauses(), self._timeout
        while True:
            try:
                # To start takes as long as the weights do; to say who it is does not.
                async with asyncio.timeout(None if method == "restart" else patience):
                    return await getattr(self._actor, method).remote()
            except TimeoutError:
                _log.error("%s does not answer, so it is killed", self.name)
                ray.kill(self._actor, no_restart=False)
                patience *= 2  # a process that has yet to import everything is none that hangs
            except ray.exceptions.ActorUnavailableError:
                _log.info("%s cannot be reached yet", self.name)
            except ray.exceptions.ActorDiedError as error:
                _log.error("Ray gave %s up: %s", self.name, _reason(error))
                self._actor = self._place()
            except ray.exceptions.RayError as error:
                _log.error("%s did not restart: %s", self.name, self._why(error))
                ray.kill(self._actor, no_restart=False)
            await pauses.pause()

    def _why(self, error: Exception) -> str:
        """Why the worker did not start, in one line."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            # Its gRPC port is any free one.
            return f"--metrics: port {self._config.metrics_port} is in use"
        return _reason(error)

    def _say_if_failed(self, following: asyncio.Task[None]) -> None:
        """A supervisor must not fail; if it does, its worker is not restarted any more."""
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.critical("%s is no longer supervised", self.name, exc_info=error)

    def _place(self) -> Any:
        host = ray.remote(actor_class(self._config.role))
        return host.options(**self._actor_options).remote(self._config, self._log_level)


class _Pauses:
    """Ever longer ones, which begin anew once there was none for a long time."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE
        self._ended = -math.inf

    async def pause(self) -> None:
        """Sleep before the next try."""
        if time.monotonic() - self._ended > _LONGEST_PAUSE:
            self._next = _FIRST_PAUSE
        await asyncio.sleep(self._next)
        self._next = min(2 * self._next, _LONGEST_PAUSE)
        self._ended = time.monotonic()


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            return f"the package {cause.name} is missing"
        return " ".join(str(cause).split()) or type(cause).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    return " ".join(str(error).split())
