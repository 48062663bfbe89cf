"""Which workers a request goes to, from load figures alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.router.load import WorkerLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that is ready, as placement sees it."""

    worker: str
    pool_tokens: int
    """Tokens that one request can hold there: more can never fit."""
    load: WorkerLoad
    backlog_tokens: int
    """Prompt tokens it has yet to compute or pull, those included that were
    sent to it and are not in `load` yet."""
    suspect: bool = False
    """An earlier attempt failed with it: taken only if there is nobody else."""

    @property
    def headroom_tokens(self) -> int:
        """What its pool can take on after its backlog; below zero when overcommitted."""
        return self.load.room_tokens - self.backlog_tokens


def choose_prefill(candidates: Iterable[Candidate], prompt_tokens: int) -> Candidate | None:
    """The one with the least to compute; `None` if the prompt fits none."""
    return min(
        (c for c in candidates if c.pool_tokens >= prompt_tokens),
        key=lambda c: (c.suspect, c.backlog_tokens, c.worker),
        default=None,
    )


def choose_decode(candidates: Iterable[Candidate], total_tokens: int) -> Candidate | None:
    """The one with the most room, then the fewest running; `None` if none is large enough."""
    return min(
        (c for c in candidates if c.pool_tokens >= total_tokens),
        key=lambda c: (c.suspect, -c.headroom_tokens, c.load.running_requests, c.worker),
        default=None,
    )


def choose_aggregated(candidates: Iterable[Candidate], total_tokens: int) -> Candidate | None:
    """The one with the most room, then the least to compute; `None` if none is large enough."""
    return min(
        (c for c in candidates if c.pool_tokens >= total_tokens),
        key=lambda c: (c.suspect, -c.headroom_tokens, c.backlog_tokens, c.worker),
        default=None,
    )
