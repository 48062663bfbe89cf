"""Progress reports to routers that watch their requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.wire.request_progress import RequestPhase, RequestProgress, WorkerProgress

INTERVAL_SECONDS: Final = 0.2
"""The shortest time between two reports."""
MOST_REQUESTS: Final = 32
"""The most requests in a report: the oldest attempts that do not generate yet, then the latest
others."""


class ProgressReports:
    """The progress reports of one worker. They cost nothing while no router watches."""

    def __init__(self) -> None:
        self._watchers: set[RouterLink] = set()
        self._due = 0.0
        self._found: dict[RouterLink, list[RequestProgress]] = {}

    def watch(self, link: RouterLink, *, on: bool) -> None:
        """Note that a router watches its requests, or no longer does."""
        if on:
            self._watchers.add(link)
        else:
            self._watchers.discard(link)
            self._found.pop(link, None)

    def is_due(self) -> bool:
        """Whether to report in this pass."""
        return bool(self._watchers) and time.monotonic() >= self._due

    def take(self, requests: Iterable[tuple[Request, RequestProgress]]) -> None:
        """Keep the progress of the requests whose routers watch, for this pass."""
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._found = {link: [] for link in self._watchers}
        for request, progress in requests:
            if request.link in self._found:
                self._found[request.link].append(progress)

    def of(self, link: RouterLink) -> WorkerProgress | None:
        """Make a router's report of this pass, with the first choice of each attempt."""
        found = self._found.get(link)
        if found is None:
            return None
        firsts = {one.attempt: one for one in reversed(found)}
        return WorkerProgress(tuple(sorted(firsts.values(), key=_turn)[:MOST_REQUESTS]))

    def clear(self) -> None:
        """Forget the reports, at the end of the pass."""
        self._found.clear()


def _turn(progress: RequestProgress) -> tuple[bool, int]:
    generates = progress.phase is RequestPhase.DECODING
    return generates, -progress.attempt if generates else progress.attempt
