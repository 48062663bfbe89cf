"""Scores of a worker for a request, by its load and its cached prefix of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.router.placement.ranking import Candidate, Score
from kvrelay.wire.worker_info import WorkerRole

_HIT_WEIGHT: Final = 2.0
"""The backlog tokens that a prompt waits behind for each token that it need not compute.

With 1, its own first token would come soonest. But tokens that are not computed shorten the queue
for all prompts that follow.
"""
_SPARE_REQUESTS: Final = 2
_SPARE_SHARE: Final = 0.25
"""The excess over the fewest requests at which a worker gets no more prompts for a hit."""


def score(role: WorkerRole, one: Candidate, hit_tokens: int = 0, fewest_requests: int = 0) -> Score:
    """The worker's score among the workers of its role.

    - A prefill worker's score is its backlog less twice its cached part of the prompt, in tokens.
      So a prefix that all ask for stays on one worker until that one's backlog is twice as long as
      the prefix, and then spreads.
    - A worker that decodes gets its cached part of the prompt as extra headroom: it is neither read
      nor held twice. But shared pages hide how many requests read them, so the bonus shrinks to
      nothing while the worker has more requests than others.

    Args:
        role: the worker's role.
        one: the worker.
        hit_tokens: tokens of the prompt that it has cached; 0: it is scored by its load alone.
        fewest_requests: the fewest requests of any worker with which it is compared.
    """
    return _SCORES[role](one, hit_tokens, fewest_requests)


def _prefill_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (one.backlog_tokens - _HIT_WEIGHT * hit_tokens, one.backlog_tokens)


def _decode_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (-_room_tokens(one, hit_tokens, fewest_requests), one.num_requests)


def _aggregated_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (-_room_tokens(one, hit_tokens, fewest_requests), one.backlog_tokens)


def spare_requests(fewest_requests: int) -> float:
    """The requests that a worker may have more than another one at about equal load."""
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
