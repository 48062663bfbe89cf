"""How good a worker is for a request: by its load, and by what it has of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.router.placement.ranking import Candidate, Score
from kvrelay.wire.worker_info import WorkerRole

_HIT_WEIGHT: Final = 2.0
"""Backlog that a prompt waits behind for each token that it need not have computed. With 1 its own
first token would come soonest; but what is not computed shortens the queue for all that follow."""
_SPARE_REQUESTS: Final = 2
_SPARE_SHARE: Final = 0.25
"""A worker with so many requests more than the one with the fewest gets none for a hit."""


def score(role: WorkerRole, one: Candidate, hit_tokens: int = 0, fewest_requests: int = 0) -> Score:
    """The worker's place among those of its role.

    - A prefill worker's backlog counts for a prompt less twice what it has of it, both in tokens.
      So a prefix that all ask for stays on one worker until that one's backlog is twice as long
      as the prefix, and then spreads.
    - A worker that decodes has as much more headroom as it has of the prompt: that is neither read
      nor held twice. But shared pages hide how many requests read them, so the bonus shrinks to
      nothing while the worker has more requests than others.

    Args:
        role: of the worker.
        one: the worker.
        hit_tokens: of the prompt, that it has; 0: it is scored by its load alone.
        fewest_requests: that any of those has with which it is compared.
    """
    return _SCORES[role](one, hit_tokens, fewest_requests)


def _prefill_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (one.backlog_tokens - _HIT_WEIGHT * hit_tokens, one.backlog_tokens)


def _decode_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (-_room_tokens(one, hit_tokens, fewest_requests), one.num_requests)


def _aggregated_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (-_room_tokens(one, hit_tokens, fewest_requests), one.backlog_tokens)


def spare_requests(fewest_requests: int) -> float:
    """Requests that a worker may have more than another one and still be about as loaded."""
    return max(_SPARE_REQUESTS, _SPARE_SHARE * fewest_requests)


def _room_tokens(one: Candidate, hit_tokens: int, fewest_requests: int) -> float:
    spare = spare_requests(fewest_requests)
    bonus = hit_tokens * max(0.0, 1 - (one.num_requests - fewest_requests) / spare)
    return one.headroom_tokens + bonus


_SCORES: Final[Mapping[WorkerRole, Callable[[Candidate, int, int], Score]]] = {
    WorkerRole.PREFILL: _prefill_score,
    WorkerRole.DECODE: _decode_score,
    WorkerRole.AGGREGATED: _aggregated_score,
}
