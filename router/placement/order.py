"""The order in which a role's workers are asked to serve a request."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain, islice
from typing import Final

from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.ranking import Candidate, Ranking, Score
from kvrelay.router.placement.ready_workers import ReadyWorkers
from kvrelay.router.placement.scores import score, spare_requests
from kvrelay.wire.worker_info import WorkerRole

_LEAST_LOADED: Final = 4
"""The least loaded workers that are weighed for a prompt."""
_LONGEST_HITS: Final = 4
"""The workers with the longest cached prefixes that are weighed for a prompt."""


class WorkerOrder:
    """The order of the ready workers for one request.

    The home of the request's session comes first. Then a few are weighed (`score`): the least
    loaded, and those with the longest cached prefixes of the prompt. The others follow by load.
    Suspects come last.

    Args:
        workers: the ready workers, which must not change before an iteration ends.
    """

    def __init__(self, workers: ReadyWorkers) -> None:
        self._workers = workers

    def holding(self, role: WorkerRole, demand: Demand) -> Iterator[Candidate]:
        """The workers of a role that can hold the request, the best first."""
        ordered = self._weigh(role, self._workers.ranking(role), demand)
        home = self.home(role, demand)
        if home is None:
            return ordered
        return chain((home,), (one for one in ordered if one.incarnation != home.incarnation))

    def computing(self, role: WorkerRole, demand: Demand) -> Iterator[Candidate]:
        """The workers of a role that can compute the request's prompt, the best first."""
        return filter(demand.may_be_computed_by, self.holding(role, demand.to_compute_on(role)))

    def home(self, role: WorkerRole, demand: Demand) -> Candidate | None:
        """The worker that has the KV of the request's session; None if it may not be chosen.

        It may not if it cannot take requests now, has failed with this one, or is full.
        """
        one = self._workers.ranking(role).get(demand.home) if demand.home else None
        if one is None or role is WorkerRole.PREFILL or not demand.trusts(one):
            return None
        is_full = one.headroom_tokens + demand.kept_tokens < demand.input_tokens
        return None if is_full or one.pool_tokens < demand.tokens_of(role) else one

    def nearer(
        self, prefill: Candidate, best: Candidate, refused: Container[str], demand: Demand
    ) -> Candidate:
        """Return the best decode worker near a prefill worker if it is about as good as the best.

        It is not if it lacks room that the best of all has, or has clearly more requests. It is not
        either if it has less of the prompt cached, and would have to read what the other need not.
        Nor is it if an earlier attempt has failed with it alone.

        Args:
            prefill: the pair's prefill worker.
            best: the best decode worker, wherever it is.
            refused: the decode workers that do not read from it.
            demand: the request's.
        """
        if not prefill.locality or prefill.locality == best.locality:
            return best
        around = self._workers.around(prefill.locality)
        ordered = self._weigh(WorkerRole.DECODE, around, demand)
        near = next((one for one in ordered if one.incarnation not in refused), None)
        if near is None:
            return best
        is_about_as_good = (
            (demand.trusts(near) or not demand.trusts(best))
            and near.headroom_tokens >= min(demand.total_tokens, best.headroom_tokens)
            and near.num_requests <= best.num_requests + spare_requests(best.num_requests)
            and self._workers.hit_tokens(near, demand) >= self._workers.hit_tokens(best, demand)
        )
        return near if is_about_as_good else best

    def _weigh(self, role: WorkerRole, ranking: Ranking, demand: Demand) -> Iterator[Candidate]:
        by_load = ranking.holding(demand.tokens_of(role), demand.suspects)
        hits = self._workers.longest_hits(role, ranking, demand, _LONGEST_HITS)
        if not hits:
            yield from by_load
            return
        few = {one.incarnation: one for one in chain(islice(by_load, _LEAST_LOADED), hits)}
        fewest = min(one.num_requests for one in few.values())

        def weight(one: Candidate) -> tuple[bool, Score, str]:
            hit = self._workers.hit_tokens(one, demand)
            return (not demand.trusts(one), score(role, one, hit, fewest), one.worker)

        yield from sorted(few.values(), key=weight)
        yield from (one for one in by_load if one.incarnation not in few)
