"""A Ray of one's own on this machine, and the one import of Ray in kvrelay.

Ray reads its settings when it is imported; whoever needs Ray therefore takes
it from here.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.deploy.environment import settle_ray

settle_ray()

import ray  # noqa: E402 (after its settings)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

__all__ = ["LocalRay", "PlacementGroupSchedulingStrategy", "ray"]

_OBJECT_STORE_BYTES = 80 << 20
"""Nearly the least that Ray accepts: neither tokens nor KV go through it."""
_LONGEST_TEMP = 40
"""Ray's unix sockets lie some 60 characters deeper, and the system's limit is 107."""


class LocalRay:
    """A context in which a fresh local Ray runs; other people's are not touched.

    To be entered in the main thread: the system ends Ray's processes when the
    thread that started them ends, even if this process is killed.

    Args:
        workers: actors that will run, each with one (logical) CPU.
        keep_logs: leave the folder of Ray's logs behind.
        log_level: of what Ray says of itself.
    """

    def __init__(
        self, workers: int, *, keep_logs: bool = False, log_level: int = logging.ERROR
    ) -> None:
        self._workers = workers
        self._keep_logs = keep_logs
        self._log_level = log_level
        self._folder = Path()

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-", dir=_short_temp()))
        try:
            ray.init(
                address="local",
                num_cpus=self._workers,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=self._log_level,
                _temp_dir=str(self._folder),
            )
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def logs(self) -> Path:
        """Where Ray's processes and the workers write their logs."""
        return self._folder / "session_latest" / "logs"

    def _stop(self) -> None:
        ray.shutdown()
        if not self._keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)


def _short_temp() -> str:
    temp = tempfile.gettempdir()
    return temp if len(temp) <= _LONGEST_TEMP else "/tmp"  # noqa: S108 (mkdtemp makes it private)
