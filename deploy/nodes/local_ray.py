"""A Ray on this machine, and the one module that imports Ray.

Ray reads its settings when it is imported, so they are set here first; other modules import
`ray` from here. With them Ray and the workers listen on loopback alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from kvrelay.deploy.nodes.ray_folder import RayFolder
from kvrelay.deploy.options.environment import set_process_variables

set_process_variables()

import ray  # noqa: E402 (after its settings)
from ray import PlacementGroupID  # noqa: E402
from ray.util.placement_group import PlacementGroup  # noqa: E402
from ray.util.scheduling_strategies import (  # noqa: E402
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

__all__ = [
    "OWN_RAY",
    "LocalRay",
    "NodeAffinitySchedulingStrategy",
    "PlacementGroup",
    "PlacementGroupID",
    "PlacementGroupSchedulingStrategy",
    "ray",
]

OWN_RAY = "kvrelay_own_ray"
"""A resource that only a Ray of this kind has."""
_OBJECT_STORE_BYTES = 80 << 20
"""The size of Ray's object store: nearly its minimum, as neither tokens nor KV go through it."""


class LocalRay:
    """A context in which a new local Ray runs, beside any other that runs on this machine.

    Enter it in the main thread: the system ends Ray's processes when the thread that
    started them ends, even if this process is killed.

    If an exception leaves the context, the folder with Ray's logs is kept, and a note
    on the exception says where it is. KeyboardInterrupt and the like do not count.

    Args:
        workers: the number of actors that will run, each on one (logical) CPU.
        keep_logs: keep the folder in any case.
        log_level: the level of Ray's own log.
        preload: modules that Ray's processes import while they wait for an actor.
    """

    def __init__(
        self,
        workers: int,
        *,
        keep_logs: bool = False,
        log_level: int = logging.ERROR,
        preload: Sequence[str] = (),
    ) -> None:
        self._workers = workers
        self._keep_logs = keep_logs
        self._log_level = log_level
        self._preload = list(preload)
        self._folder: RayFolder | None = None

    def __enter__(self) -> Self:
        self._folder = RayFolder()
        try:
            with _own_parameters():
                ray.init(
                    address="local",
                    num_cpus=self._workers,
                    resources={OWN_RAY: 1.0},
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    logging_level=self._log_level,
                    _temp_dir=str(self._folder.path),
                    **self._own_settings(),
                )
        except BaseException as error:
            self._stop(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop(error)

    def keep_logs(self) -> None:
        """Keep the folder with the logs when the context is left."""
        self._keep_logs = True

    @property
    def logs(self) -> Path:
        """The folder in which Ray's processes and the workers write their logs."""
        assert self._folder is not None, "not entered"
        return self._folder.path / "session_latest" / "logs"

    def _own_settings(self) -> dict[str, Any]:
        """Return the settings that a Ray has only if there are modules to import."""
        return (
            {"_system_config": {"preload_python_modules": self._preload}} if self._preload else {}
        )

    def _stop(self, error: BaseException | None) -> None:
        assert self._folder is not None, "not entered"
        failed = isinstance(error, Exception)
        try:
            ray.shutdown()
        finally:
            if failed or self._keep_logs:
                self._folder.keep()
            else:
                self._folder.remove()
        if error is not None and failed:
            error.add_note(f"the logs are in {self.logs}")


_PARAMETERS = {
    # Any free port; else it is 52365, which one agent of a machine can have.
    "dashboard_agent_listen_port": 0,
    # Nothing scales here, so nothing that would decide on it runs.
    "no_monitor": True,
}
"""The parameters that `ray start` has options for, and `ray.init` has not."""


@contextlib.contextmanager
def _own_parameters() -> Iterator[None]:
    """Let a Ray that starts in this context use `_PARAMETERS`, except those it no longer knows.

    Nor does it start the dashboard's server, which Ray otherwise waits for, even without a
    dashboard.
    """
    parameter, services = ray._private.parameter, ray._private.services
    known = inspect.signature(parameter.RayParams).parameters
    own = {name: value for name, value in _PARAMETERS.items() if name in known}
    with contextlib.ExitStack() as stack:
        params = functools.partial(parameter.RayParams, **own)
        stack.enter_context(_replaced(parameter, "RayParams", params))
        if hasattr(services, "start_api_server"):
            stack.enter_context(_replaced(services, "start_api_server", _start_no_server))
        yield


def _start_no_server(*_args: object, **_options: object) -> tuple[str, None]:
    return "", None


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
