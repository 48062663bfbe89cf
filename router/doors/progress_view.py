"""The progress of requests through the workers, for the live page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.router.placement.fleet import Fleet
from kvrelay.wire.request_progress import RequestPhase, RequestProgress
from kvrelay.wire.worker_info import WorkerRole

MOST_SHOWN: Final = 12


@dataclass(slots=True)
class _AttemptProgress:
    """One attempt, as its workers report it."""

    request_id: str
    prefill: str = ""
    decode: str = ""
    by_prefill: RequestProgress | None = None
    by_decode: RequestProgress | None = None

    @property
    def phase(self) -> RequestPhase:
        """The decode side's phase from its first read on; before that, the prefill side's."""
        mine, other = self.by_decode, self.by_prefill
        if mine is not None and (other is None or mine.phase in _LATE):
            return mine.phase
        assert other is not None, "it is made of what a worker says"
        return other.phase


_LATE: Final = (RequestPhase.READING, RequestPhase.DECODING)


class ProgressView:
    """A view of the progress of requests, which workers report only while anybody watches.

    Args:
        fleet: the workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.viewers = 0
        """The number of viewers, who `watching` counts."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count a viewer while the context lasts."""
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1
            self._tell()

    def shown(self) -> list[dict[str, Any]]:
        """Some requests, for JSON: those that do not generate yet, and the latest of the others."""
        self._tell()  # workers that have come since
        attempts = self._attempts()
        coming = [n for n in sorted(attempts) if attempts[n].phase is not RequestPhase.DECODING]
        others = sorted(attempts.keys() - set(coming), reverse=True)
        return [_as_json(n, attempts[n]) for n in sorted([*coming, *others][:MOST_SHOWN])]

    def _tell(self) -> None:
        for link in self._fleet.links:
            link.watch(on=self.viewers > 0)

    def _attempts(self) -> dict[int, _AttemptProgress]:
        attempts: dict[int, _AttemptProgress] = {}
        for link in self._fleet.links:
            for request_id, progress in link.progress:
                one = attempts.setdefault(progress.attempt, _AttemptProgress(request_id))
                if link.endpoint.role is WorkerRole.PREFILL:
                    one.prefill, one.by_prefill = link.endpoint.name, progress
                else:
                    one.decode, one.by_decode = link.endpoint.name, progress
        return attempts


def _as_json(attempt: int, one: _AttemptProgress) -> dict[str, Any]:
    nothing = RequestProgress(attempt, RequestPhase.QUEUED)
    prefill, decode = one.by_prefill or nothing, one.by_decode or nothing
    return {
        "request_id": one.request_id,
        "attempt": attempt,
        "prefill": one.prefill,
        "decode": one.decode,
        "phase": one.phase.value,
        "pages": max(prefill.pages, decode.pages),
        "written": max(prefill.written_pages, 0 if one.prefill else decode.written_pages),
        # The two sides report at different moments.
        "announced": max(prefill.announced_pages, decode.pulled_pages),
        "pulled": decode.pulled_pages,
        "owned": decode.owned_pages,
        "output_tokens": decode.output_tokens,
    }
