"""Weighs what workers have of a prompt against what they have to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from itertools import islice
from typing import Final

from kvrelay.router.known_prefixes import KnownPrefixes, PromptMarks
from kvrelay.router.ranking import Candidate, Ranking, Score
from kvrelay.wire.worker_info import WorkerRole

_LEAST_LOADED: Final = 4
_LONGEST_HITS: Final = 4
_HIT_WEIGHT: Final = 2.0
"""Backlog that a prompt waits behind for each token that it need not have computed. With 1 its own
first token would come soonest; but what is not computed shortens the queue for all that follow."""
_SPARE_REQUESTS: Final = 2
_SPARE_SHARE: Final = 0.25
"""A worker with so many requests more than the one with the fewest gets none for a hit."""


class Affinity:
    """Orders the candidates for one request: a few are weighed, the others follow by load.

    Weighed are the least loaded ones and those that have the longest prefixes of the prompt.

    - A prefill worker's backlog counts for a prompt less twice what it has of it, both in tokens.
      So a prefix that all ask for stays on one worker until that one's backlog is twice as long
      as the prefix, and then spreads.
    - A worker that decodes has as much more headroom as it has of the prompt: that is neither read
      nor held twice. But shared pages hide how many requests read them, so the bonus shrinks to
      nothing while the worker has more requests than others.

    Args:
        prefixes: that the workers have.
    """

    def __init__(self, prefixes: KnownPrefixes) -> None:
        self._prefixes = prefixes

    def order(
        self,
        role: WorkerRole,
        ranking: Ranking,
        tokens: int,
        marks: PromptMarks,
        suspects: Set[str],
    ) -> Iterator[Candidate]:
        """The candidates that can hold so many tokens of a request, the best first.

        Args:
            role: of all of them.
            ranking: of them by load alone.
            tokens: of the request.
            marks: of its prompt.
            suspects: incarnations that come after all others. Nothing may be ranked
                before the iteration ends.
        """
        by_load = ranking.holding(tokens, suspects)
        hits = self._prefixes.longest(role, marks, _LONGEST_HITS) if marks else {}
        if not hits:
            return by_load
        return self._weighed_first(role, ranking, tokens, marks, suspects, by_load, hits)

    def _weighed_first(
        self,
        role: WorkerRole,
        ranking: Ranking,
        tokens: int,
        marks: PromptMarks,
        suspects: Set[str],
        by_load: Iterator[Candidate],
        hits: dict[str, int],
    ) -> Iterator[Candidate]:
        few = {one.incarnation: one for one in islice(by_load, _LEAST_LOADED)}
        for incarnation in hits:
            one = ranking.get(incarnation)
            if one is not None and one.pool_tokens >= tokens:
                few[incarnation] = one
        fewest = min((one.num_requests for one in few.values()), default=0)
        score = _SCORES[role]

        def key(one: Candidate) -> tuple[bool, Score, str]:
            hit = hits.get(one.incarnation)
            if hit is None:
                hit = self._prefixes.hit_tokens(one.incarnation, marks)
            return (one.incarnation in suspects, score(one, hit, fewest), one.worker)

        yield from sorted(few.values(), key=key)
        yield from (one for one in by_load if one.incarnation not in few)


def _prefill_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    return (one.backlog_tokens - _HIT_WEIGHT * hit_tokens, one.backlog_tokens)


def _decode_score(one: Candidate, hit_tokens: int, fewest_requests: int) -> Score:
    spare = max(_SPARE_REQUESTS, _SPARE_SHARE * fewest_requests)
    bonus = hit_tokens * max(0.0, 1 - (one.num_requests - fewest_requests) / spare)
    return (-one.headroom_tokens - bonus, one.num_requests)


_SCORES: Final[Mapping[WorkerRole, Callable[[Candidate, int, int], Score]]] = {
    WorkerRole.PREFILL: _prefill_score,
    WorkerRole.DECODE: _decode_score,
    WorkerRole.AGGREGATED: _decode_score,
}
"""By what the prompt's prefix is worth there: tokens that are there, and the fewest requests that
any of the candidates has."""
