"""When routers that watch are told how far their requests have come."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.engine.scheduler.request import Request
from kvrelay.wire.request_progress import RequestPhase, RequestProgress, WorkerProgress

INTERVAL_SECONDS: Final = 0.2
"""Between two reports, at least."""
MOST_REQUESTS: Final = 32
"""Of a report; the oldest attempts of those that do not generate yet, then the latest others."""


class ProgressReports:
    """Collects what routers that watch are told. Without one it costs nothing."""

    def __init__(self) -> None:
        self._watchers: set[RouterLink] = set()
        self._due = 0.0
        self._found: dict[RouterLink, list[RequestProgress]] = {}

    def watch(self, link: RouterLink, *, on: bool) -> None:
        """A router watches its requests, or does so no more."""
        if on:
            self._watchers.add(link)
        else:
            self._watchers.discard(link)
            self._found.pop(link, None)

    def is_due(self) -> bool:
        """Whether a router is to be told in this pass."""
        return bool(self._watchers) and time.monotonic() >= self._due

    def take(self, requests: Iterable[tuple[Request, RequestProgress]]) -> None:
        """Keep what this pass has for the routers that watch."""
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._found = {link: [] for link in self._watchers}
        for request, progress in requests:
            if request.link in self._found:
                self._found[request.link].append(progress)

    def of(self, link: RouterLink) -> WorkerProgress | None:
        """What a router is told in this pass: of an attempt the first of its choices here."""
        found = self._found.get(link)
        if found is None:
            return None
        firsts = {one.attempt: one for one in reversed(found)}
        return WorkerProgress(tuple(sorted(firsts.values(), key=_turn)[:MOST_REQUESTS]))

    def clear(self) -> None:
        """The pass is over."""
        self._found.clear()


def _turn(progress: RequestProgress) -> tuple[bool, int]:
    generates = progress.phase is RequestPhase.DECODING
    return generates, -progress.attempt if generates else progress.attempt
