"""The order of workers by their cached prefix of a prompt and by their load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ranking import Candidate, Ranking, Score
from kvrelay.router.placement.scores import score
from kvrelay.wire.worker_info import WorkerRole

_LEAST_LOADED: Final = 4
_LONGEST_HITS: Final = 4


class Affinity:
    """The order of the candidates for one request: a few are scored, the others follow by load.

    The least loaded candidates and those with the longest cached prefixes of the prompt are scored
    (`score`).

    Args:
        prefixes: the prefixes that the workers have cached.
    """

    def __init__(self, prefixes: KnownPrefixes) -> None:
        self._prefixes = prefixes

    def order(self, role: WorkerRole, ranking: Ranking, demand: Demand) -> Iterator[Candidate]:
        """The candidates that can hold the request, the best first, and suspects last.

        The ranking must not change before the iteration ends.

        Args:
            role: the role of all candidates.
            ranking: the candidates by load alone.
            demand: the request's.
        """
        by_load = ranking.holding(demand.tokens_of(role), demand.suspects)
        hits = self._longest(role, ranking, demand)
        if not hits:
            yield from by_load
            return
        few = {one.incarnation: one for one in islice(by_load, _LEAST_LOADED)}
        few |= {one.incarnation: one for one in hits}
        yield from self._weighed(role, list(few.values()), demand)
        yield from (one for one in by_load if one.incarnation not in few)

    def _longest(self, role: WorkerRole, ranking: Ranking, demand: Demand) -> list[Candidate]:
        """The candidates with the longest cached prefixes of the prompt; no suspects."""
        if not demand.marks:
            return []
        tokens = demand.tokens_of(role)

        def may_be_chosen(incarnation: str) -> bool:
            one = ranking.get(incarnation)
            return one is not None and one.pool_tokens >= tokens and demand.trusts(one)

        longest = self._prefixes.longest(role, demand.marks, _LONGEST_HITS, may_be_chosen)
        return [one for one in map(ranking.get, longest) if one is not None]

    def _weighed(self, role: WorkerRole, few: list[Candidate], demand: Demand) -> list[Candidate]:
        fewest = min(one.num_requests for one in few)

        def key(one: Candidate) -> tuple[bool, Score, str]:
            hit = self._prefixes.hit_tokens(one.incarnation, demand.marks)
            return (not demand.trusts(one), score(role, one, hit, fewest), one.worker)

        return sorted(few, key=key)
