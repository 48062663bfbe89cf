"""A line on a terminal that shows how far a run is."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich import progress as bars
from rich.console import Console

from kvrelay.deploy.load_generator.load_client import RequestRecord
from kvrelay.deploy.load_generator.workload import Job


class Sender(Protocol):
    """A client that sends jobs to one server, over either protocol."""

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end; a failure is in the record."""
        ...


class RunProgress:
    """A context that shows the number of a run's ended requests, on a terminal only."""

    def __init__(self, requests: int) -> None:
        console = Console(stderr=True)
        self._bars = bars.Progress(
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[failed]} failed"),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
            refresh_per_second=2,  # what it costs is taken from the load
        )
        self._task = self._bars.add_task("", total=requests, failed=0)
        self.ended = 0
        self.failed = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def take(self, record: RequestRecord) -> None:
        """Count one more request that has ended."""
        self.ended += 1
        self.failed += not record.completed
        self._bars.update(self._task, completed=self.ended, failed=self.failed)


class Followed:
    """A client whose requests a `RunProgress` counts."""

    def __init__(self, client: Sender, progress: RunProgress) -> None:
        self._client = client
        self._progress = progress

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end."""
        record = await self._client.send(job)
        self._progress.take(record)
        return record
