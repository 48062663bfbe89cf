"""Chooses the workers for a request, by their load alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.wire.load import WorkerLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker and its load."""

    worker: str
    pool_tokens: int
    """Tokens that one request can hold there: a longer one can never fit."""
    load: WorkerLoad
    backlog_tokens: int
    """Prompt tokens it has yet to compute or pull, those included that were
    sent to it and are not in `load` yet."""
    suspect: bool = False
    """An earlier attempt of the request failed with it: chosen only if there is no other."""

    @property
    def headroom_tokens(self) -> int:
        """Tokens that its pool has free after its backlog; below zero when overcommitted."""
        return self.load.room_tokens - self.backlog_tokens


def choose_prefill(candidates: Iterable[Candidate], prompt_tokens: int) -> Candidate | None:
    """The worker with the shortest backlog; None if the prompt fits no worker."""
    return min(
        (c for c in candidates if c.pool_tokens >= prompt_tokens),
        key=lambda c: (c.suspect, c.backlog_tokens, c.worker),
        default=None,
    )


def choose_decode(candidates: Iterable[Candidate], total_tokens: int) -> Candidate | None:
    """The worker with the most headroom, then the fewest running requests; None if none fits."""
    return min(
        (c for c in candidates if c.pool_tokens >= total_tokens),
        key=lambda c: (c.suspect, -c.headroom_tokens, c.load.running_requests, c.worker),
        default=None,
    )


def choose_aggregated(candidates: Iterable[Candidate], total_tokens: int) -> Candidate | None:
    """The worker with the most headroom, then the shortest backlog; None if none fits."""
    return min(
        (c for c in candidates if c.pool_tokens >= total_tokens),
        key=lambda c: (c.suspect, -c.headroom_tokens, c.backlog_tokens, c.worker),
        default=None,
    )
