"""A Ray of one's own on this machine, and the one import of Ray in kvrelay.

Ray reads its settings when it is imported; whoever needs Ray therefore takes
it from here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.deploy.environment import settle_ray
from kvrelay.deploy.ray_folder import RayFolder

settle_ray()

import ray  # noqa: E402 (after its settings)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

__all__ = ["LocalRay", "PlacementGroupSchedulingStrategy", "ray"]

_OBJECT_STORE_BYTES = 80 << 20
"""Nearly the least that Ray accepts: neither tokens nor KV go through it."""


class LocalRay:
    """A context in which a fresh local Ray runs; other people's are not touched.

    To be entered in the main thread: the system ends Ray's processes when the
    thread that started them ends, even if this process is killed.

    A failure that leaves the context keeps the folder of Ray's logs and notes
    where it is; a stop that the user asked for (KeyboardInterrupt and the like)
    is none.

    Args:
        workers: actors that will run, each with one (logical) CPU.
        keep_logs: keep that folder in any case.
        log_level: of what Ray says of itself.
    """

    def __init__(
        self, workers: int, *, keep_logs: bool = False, log_level: int = logging.ERROR
    ) -> None:
        self._workers = workers
        self._keep_logs = keep_logs
        self._log_level = log_level
        self._folder: RayFolder | None = None

    def __enter__(self) -> Self:
        self._folder = RayFolder()
        try:
            ray.init(
                address="local",
                num_cpus=self._workers,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=self._log_level,
                _temp_dir=str(self._folder.path),
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

    @property
    def logs(self) -> Path:
        """Where Ray's processes and the workers write their logs."""
        assert self._folder is not None, "not entered"
        return self._folder.path / "session_latest" / "logs"

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
