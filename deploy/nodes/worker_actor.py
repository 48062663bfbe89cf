"""The Ray actor of one worker, as its supervisor calls it from another process."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from kvrelay.deploy.bounded_waits import LONGEST_SECONDS, Pauses, is_done_within
from kvrelay.deploy.nodes.left_over import named_actor
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.worker_host import BUILDERS, WorkerHost, actor_class
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_ASK_AGAIN_SECONDS: Final = 0.2


class WorkerActor:
    """The handle of a worker's actor.

    Making it places the actor; Ray then starts a new process whenever one ends.

    Args:
        config: the worker's configuration, but for its part of a GPU.
        placement: Ray's options: where the actor runs and which resources it takes there.
        log_level: the level of the worker's log.
    """

    def __init__(self, config: WorkerConfig, placement: dict[str, Any], log_level: int) -> None:
        gpus = placement.get("num_gpus") or 1.0
        self.config = replace(config, gpu_part=min(1.0, gpus))
        """The worker's configuration where it is placed."""
        self._placement = placement
        self._log_level = log_level
        self._handle = self._place(**placement)

    async def call(
        self,
        method: Callable[Concatenate[WorkerHost, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the actor, as ``call(WorkerHost.heartbeat)``, and wait for its result.

        Raises:
            ray.exceptions.RayTaskError: the method raised.
            ray.exceptions.RayActorError: the process has ended, or cannot be reached.
        """
        result: T = await getattr(self._handle, method.__name__).remote(*args, **kwargs)
        return result

    async def call_until_answered(
        self,
        method: Callable[[WorkerHost], Coroutine[Any, Any, T]],
        *,
        seconds: float,
        longest_pause_seconds: float = LONGEST_SECONDS,
        on_failure: Callable[[], object] = lambda: None,
    ) -> T:
        """Call the actor until it answers, if need be in a new process.

        The worker has started before with this configuration, so a failure is taken as temporary.
        The call is repeated in a fresh process, after ever longer pauses. Ray starts one by itself
        when a process dies meanwhile, and calls that one unavailable like one out of reach. So each
        process is asked for its identity first.

        Args:
            method: the method, which is called without arguments.
            seconds: the time after which a process that has not answered is killed. It doubles for
                each further process, because one that still imports its modules does not hang.
            longest_pause_seconds: the longest pause between two attempts.
            on_failure: called whenever a process has failed.
        """
        name, pauses = self.config.name, Pauses(longest_pause_seconds)
        called: ProcessIdentity | None = None  # the process whose fate is unknown
        told: ProcessIdentity | None = None  # the one whose failure was told; it may still answer

        async def call() -> T:
            nonlocal called
            process = await self.call(WorkerHost.process)
            before, called = called, None if process == told else process
            if before is not None and before != called:
                _log.info("%s died before it had answered", name)
                on_failure()
            return await self.call(method)

        while True:
            answer = asyncio.create_task(call())
            try:
                if await is_done_within(answer, seconds):
                    return answer.result()
                _log.error("%s has not answered for %g s, so it is killed", name, seconds)
                self.restart()
                seconds *= 2
            except ray.exceptions.ActorUnavailableError:
                _log.info("%s cannot be reached yet", name)
                await pauses.pause()
                continue
            except ray.exceptions.ActorDiedError as error:
                _log.error("Ray gave %s up: %s", name, reason_of(error))
                self.place_again()
            except ray.exceptions.RayError as error:
                _log.error("%s did not restart: %s", name, self.why(error))
                self.restart()
            finally:
                answer.cancel()
            told, called = called or told, None
            on_failure()
            await pauses.pause()

    async def ask_who_it_is(
        self, *, seconds: float, on_failure: Callable[[], object] = lambda: None
    ) -> WorkerInfo | None:
        """Ask until the process answers; None: no worker has started in it yet.

        One that has not answered after `seconds` is killed. A new process may have to import
        modules before it answers. Ray fails calls until it has noticed that a process has ended, so
        the pauses are short.
        """
        return await self.call_until_answered(
            WorkerHost.current,
            seconds=seconds,
            longest_pause_seconds=_ASK_AGAIN_SECONDS,
            on_failure=on_failure,
        )

    def why(self, error: Exception) -> str:
        """Return why the worker did not start, in one line."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            # Its gRPC port is any free one.
            return f"--metrics: port {self.config.metrics_port} is in use"
        return reason_of(error)

    def restart(self) -> None:
        """Kill the process; Ray starts another one."""
        ray.kill(self._handle, no_restart=False)

    def remove(self) -> None:
        """Kill the process for good."""
        ray.kill(self._handle)

    def place_again(self) -> None:
        """Make the actor again after Ray has given it up, unless one of its name exists.

        When a node was told to leave, Ray reports its actors as dead but still starts them
        elsewhere. An actor that is not detached ends with the handle that made it: a handle that
        was found by name does not keep it alive.
        """
        name = self._placement.get("name")
        detached = "lifetime" in self._placement
        if name is None or detached or named_actor(None, name) is None:
            self._handle = self._place(**self._placement)

    def _place(self, **options: Any) -> Any:
        role = self.config.role
        placed = ray.remote(actor_class(role)).options(**options)
        return placed.remote(self.config, BUILDERS[role], self._log_level)


def reason_of(error: Exception) -> str:
    """Return why a call failed, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            return f"the package {cause.name} is missing"
        return " ".join(str(cause).split()) or type(cause).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    return " ".join(str(error).split())
