"""The Ray actor of one worker, as its supervisor calls it from another process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvrelay.deploy.local_ray import ray
from kvrelay.deploy.worker_host import BUILDERS, WorkerHost, actor_class
from kvrelay.engine.config import WorkerConfig

P = ParamSpec("P")
T = TypeVar("T")


class WorkerActor:
    """Places the actor when it is made; Ray then starts a new process whenever one ends.

    Args:
        config: what the worker is to be.
        placement: Ray's options: where the actor runs and what it takes there.
        log_level: of the worker's process.
    """

    def __init__(self, config: WorkerConfig, placement: dict[str, Any], log_level: int) -> None:
        self._config = config
        self._placement = placement
        self._log_level = log_level
        self._handle = self._place()

    async def call(
        self,
        method: Callable[Concatenate[WorkerHost, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the actor, as ``call(WorkerHost.drain)``, and wait for its result.

        Raises:
            ray.exceptions.RayTaskError: the method raised.
            ray.exceptions.RayActorError: the process has ended, or cannot be reached.
        """
        result: T = await getattr(self._handle, method.__name__).remote(*args, **kwargs)
        return result

    def restart(self) -> None:
        """Kill the process; Ray starts another one."""
        ray.kill(self._handle, no_restart=False)

    def remove(self) -> None:
        """Kill the process for good."""
        ray.kill(self._handle)

    def place_again(self) -> None:
        """Make the actor anew, after Ray has given it up."""
        self._handle = self._place()

    def _place(self) -> Any:
        role = self._config.role
        placed = ray.remote(actor_class(role)).options(**self._placement)
        return placed.remote(self._config, BUILDERS[role], self._log_level)


def reason_of(error: Exception) -> str:
    """Why a call failed, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            return f"the package {cause.name} is missing"
        return " ".join(str(cause).split()) or type(cause).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return "its process died"
    return " ".join(str(error).split())
