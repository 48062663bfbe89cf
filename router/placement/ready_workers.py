"""The workers that can take requests, ranked by load, and who of them reads from whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.estimate import ExpectedPrompts
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ranking import Candidate, Ranking
from kvrelay.router.placement.scores import score
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.worker_info import WorkerRole

_NO_LOAD: Final = WorkerLoad()
_NOBODY: Final = Ranking()
_NONE_REFUSED: Final[Mapping[str, str]] = {}


class ReadyWorkers:
    """The ready workers by role, in the order of their load alone.

    Args:
        prefixes: the prefixes that the workers have cached.
        queue_of: tells the prompts that an incarnation has to compute.
    """

    def __init__(self, prefixes: KnownPrefixes, queue_of: Callable[[str], ExpectedPrompts]) -> None:
        self._prefixes = prefixes
        self._queue_of = queue_of
        self._rankings = {role: Ranking() for role in WorkerRole}
        self._around: dict[str, Ranking] = {}  # decode workers, by a locality that has some
        self._decode_loads: dict[str, WorkerLoad] = {}
        self._refusals: dict[str, dict[str, str]] = {}  # by prefill, then by ready decode worker

    def put(self, role: WorkerRole, candidate: Candidate) -> bool:
        """Rank a worker that can take requests, by its present state.

        Returns whether the set of workers that may be chosen has changed.
        """
        ranking, incarnation = self._rankings[role], candidate.incarnation
        is_new = incarnation not in ranking
        its_score = score(role, candidate)
        ranking.put(candidate, its_score)
        if role is not WorkerRole.DECODE:
            return is_new
        if candidate.locality:
            self._around.setdefault(candidate.locality, Ranking()).put(candidate, its_score)
        return self._note_refusals(incarnation, candidate.load) or is_new

    def drop(self, role: WorkerRole, incarnation: str) -> bool:
        """Forget a worker that can take no requests; return whether it could before."""
        ranked = self._rankings[role].get(incarnation)
        if ranked is None:
            return False
        self._rankings[role].drop(incarnation)
        if role is WorkerRole.DECODE and ranked.locality:
            around = self._around[ranked.locality]
            around.drop(incarnation)
            if not around:
                del self._around[ranked.locality]
        self._note_refusals(incarnation, _NO_LOAD)
        self._decode_loads.pop(incarnation, None)
        return True

    def ranking(self, role: WorkerRole) -> Ranking:
        """The workers of a role, by load alone."""
        return self._rankings[role]

    def around(self, locality: str) -> Ranking:
        """The decode workers of a locality, by load alone."""
        return self._around.get(locality, _NOBODY)

    def refusals_of(self, prefill: Candidate) -> Mapping[str, str]:
        """The decode workers that do not read from a prefill worker, each with its reason."""
        return self._refusals.get(prefill.incarnation, _NONE_REFUSED)

    def any_reads(self, prefill: Candidate) -> bool:
        """Whether any decode worker reads from a prefill worker."""
        return len(self.refusals_of(prefill)) < len(self._rankings[WorkerRole.DECODE])

    def queue_of(self, one: Candidate) -> ExpectedPrompts:
        """The prompts that a worker has to compute, for estimates."""
        return self._queue_of(one.incarnation)

    def hit_tokens(self, one: Candidate, demand: Demand) -> int:
        """The tokens of a prompt that a worker has cached, by the demand's marks."""
        return self._prefixes.hit_tokens(one.incarnation, demand.marks)

    def longest_hits(
        self, role: WorkerRole, ranking: Ranking, demand: Demand, most: int
    ) -> list[Candidate]:
        """The workers of a ranking that have most of a prompt cached and can hold it; no suspects.

        Args:
            role: the role of all workers of the ranking.
            ranking: the workers to choose from.
            demand: the prompt's.
            most: the most workers.
        """
        if not demand.marks:
            return []
        tokens = demand.tokens_of(role)

        def may_be_chosen(incarnation: str) -> bool:
            one = ranking.get(incarnation)
            return one is not None and one.pool_tokens >= tokens and demand.trusts(one)

        longest = self._prefixes.longest(role, demand.marks, most, may_be_chosen)
        return [one for one in map(ranking.get, longest) if one is not None]

    def _note_refusals(self, decode: str, load: WorkerLoad) -> bool:
        """Note whom a decode worker does not read from; return whether that has changed."""
        before = self._decode_loads.get(decode, _NO_LOAD)
        self._decode_loads[decode] = load
        if load.peers is before.peers:
            return False
        old, new = before.refused_peers, load.refused_peers
        for prefill in old.keys() - new.keys():
            del self._refusals[prefill][decode]
            if not self._refusals[prefill]:
                del self._refusals[prefill]
        for prefill, refusal in new.items():
            self._refusals.setdefault(prefill, {})[decode] = refusal
        return old != new
