"""The decode workers near a prefill worker, which are preferred at about equal load."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.router.placement.affinity import Affinity
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ranking import Candidate, Ranking, Score
from kvrelay.router.placement.scores import spare_requests
from kvrelay.wire.worker_info import WorkerRole

_NOBODY = Ranking()


class NearWorkers:
    """Ready decode workers with a known locality, ranked within each locality.

    Args:
        affinity: orders them for a request.
        prefixes: the prefixes that the workers have cached.
    """

    def __init__(self, affinity: Affinity, prefixes: KnownPrefixes) -> None:
        self._affinity = affinity
        self._prefixes = prefixes
        self._rankings: dict[str, Ranking] = {}  # by locality, which has workers

    def put(self, decode: Candidate, score: Score) -> None:
        """Rank a decode worker; it replaces its incarnation's earlier state."""
        if decode.locality:
            self._rankings.setdefault(decode.locality, Ranking()).put(decode, score)

    def drop(self, decode: Candidate) -> None:
        """Remove a decode worker that was put."""
        if not decode.locality:
            return
        ranking = self._rankings[decode.locality]
        ranking.drop(decode.incarnation)
        if not ranking:
            del self._rankings[decode.locality]

    def nearer(
        self,
        prefill: Candidate,
        best: Candidate,
        demand: Demand,
        may_be: Callable[[Candidate], bool],
    ) -> Candidate:
        """Choose the decode worker for a pair: one near the prefill worker, or the best of all.

        The best near one is taken, with four exceptions. It lacks room that the best of all has. It
        has clearly more requests. It has less of the prompt cached, and would have to read what the
        other need not. An earlier attempt has failed with it alone.

        Args:
            prefill: the pair's prefill worker.
            best: the best decode worker, wherever it is.
            demand: the request's.
            may_be: whether the pair may have a decode worker.
        """
        if not prefill.locality or prefill.locality == best.locality:
            return best
        ranking = self._rankings.get(prefill.locality, _NOBODY)
        ordered = self._affinity.order(WorkerRole.DECODE, ranking, demand)
        near = next(filter(may_be, ordered), None)
        return near if near is not None and self._is_about_as_good(near, best, demand) else best

    def _is_about_as_good(self, near: Candidate, best: Candidate, demand: Demand) -> bool:
        room = min(demand.total_tokens, best.headroom_tokens)
        most_requests = best.num_requests + spare_requests(best.num_requests)
        return (
            (demand.trusts(near) or not demand.trusts(best))
            and near.headroom_tokens >= room
            and near.num_requests <= most_requests
            and self._hit_tokens(near, demand) >= self._hit_tokens(best, demand)
        )

    def _hit_tokens(self, one: Candidate, demand: Demand) -> int:
        return self._prefixes.hit_tokens(one.incarnation, demand.marks) if demand.marks else 0
