"""The choice of workers for an attempt, by their scores and by who reads from whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final, Generic, TypeVar

from kvrelay.router.placement.affinity import Affinity
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.near_workers import NearWorkers
from kvrelay.router.placement.ranking import Candidate, Ranking
from kvrelay.router.placement.scores import score
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.worker_info import WorkerRole

ItemT = TypeVar("ItemT")


_NO_LOAD: Final = WorkerLoad()


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The workers for an attempt; without `prefill`, `decode` computes the prompt, too."""

    decode: Candidate
    prefill: Candidate | None


@dataclass(frozen=True, slots=True)
class Shortage:
    """The result when no workers can serve an attempt now."""

    missing: WorkerRole
    refusal: str = ""
    """Why a decode worker reads from no prefill worker, if that is the reason."""


class Placer:
    """The ready workers in the order of their scores, and the choice among them.

    A choice looks at the best of each role first. It looks at others only where those cannot hold
    the request or refuse each other. It finds workers whenever any can serve.

    Args:
        prefixes: the prefixes that the workers have cached.
        decodes_alone: whether decode workers may compute prompts, too.
    """

    def __init__(self, prefixes: KnownPrefixes, *, decodes_alone: bool = False) -> None:
        self._alone = [WorkerRole.AGGREGATED, *[WorkerRole.DECODE] * decodes_alone]
        self._affinity = Affinity(prefixes)
        self._neighbours = NearWorkers(self._affinity, prefixes)
        self._rankings = {role: Ranking() for role in WorkerRole}
        self._decode_loads: dict[str, WorkerLoad] = {}  # of the ready ones
        self._refusals: dict[str, dict[str, str]] = {}  # by prefill, then by ready decode worker

    @property
    def pairs_ready(self) -> bool:
        """Whether at least one prefill and one decode worker can take requests."""
        return bool(self._rankings[WorkerRole.PREFILL] and self._rankings[WorkerRole.DECODE])

    @property
    def one_alone_ready(self) -> bool:
        """Whether at least one worker can take requests without another one."""
        return any(self._rankings[role] for role in self._alone)

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
        self._neighbours.put(candidate, its_score)
        return self._note_refusals(incarnation, candidate.load) or is_new

    def drop(self, role: WorkerRole, incarnation: str) -> bool:
        """Forget a worker that can take no requests; return whether it could before."""
        ranked = self._rankings[role].get(incarnation)
        if ranked is None:
            return False
        self._rankings[role].drop(incarnation)
        if role is WorkerRole.DECODE:
            self._neighbours.drop(ranked)
        self._note_refusals(incarnation, _NO_LOAD)
        self._decode_loads.pop(incarnation, None)
        return True

    def choose(self, demand: Demand) -> WorkerPair | Shortage:
        """Choose the workers for an attempt.

        They are a prefill and a decode worker that reads from it. If there is no such pair, it is
        one worker that needs no other.
        """
        home = self._home(WorkerRole.AGGREGATED, demand)
        if home is not None and demand.may_be_computed_by(home):
            return WorkerPair(home, None)
        pair = self._choose_pair(demand)
        if isinstance(pair, WorkerPair):
            return pair
        for role in self._alone:
            best = next(self._best_to_compute(role, demand), None)
            if best is not None:
                return WorkerPair(best, None)
        return Shortage(WorkerRole.DECODE) if WorkerRole.DECODE in self._alone else pair

    def best_to_compute(self, demand: Demand, most: int) -> Iterator[tuple[WorkerRole, Candidate]]:
        """Iterate over the best workers that may compute a prompt, at most `most` of each role."""
        for role in (WorkerRole.PREFILL, *self._alone):
            for one in islice(self._best_to_compute(role, demand), most):
                yield role, one

    def _choose_pair(self, demand: Demand) -> WorkerPair | Shortage:
        """Choose the best pair without a suspect, else the best of all."""
        pair = self._first_pair(demand, demand.trusts) if demand.suspects else None
        return pair if isinstance(pair, WorkerPair) else self._first_pair(demand, lambda one: True)

    def _first_pair(
        self, demand: Demand, may_be: Callable[[Candidate], bool]
    ) -> WorkerPair | Shortage:
        prefills = filter(may_be, self._best_to_compute(WorkerRole.PREFILL, demand))
        decodes = _Again(filter(may_be, self._best(WorkerRole.DECODE, demand)))
        shortage = Shortage(WorkerRole.PREFILL)
        for prefill in prefills:
            if next(iter(decodes), None) is None:
                return Shortage(WorkerRole.DECODE)
            refused = self._refusals.get(prefill.incarnation, {})
            decode = self._first_reader(prefill, refused, decodes, demand, may_be)
            if decode is not None:
                return WorkerPair(decode, prefill)
            shortage = Shortage(WorkerRole.DECODE, next(iter(refused.values()), shortage.refusal))
        return shortage

    def _first_reader(
        self,
        prefill: Candidate,
        refused: Mapping[str, str],
        decodes: Iterable[Candidate],
        demand: Demand,
        may_be: Callable[[Candidate], bool],
    ) -> Candidate | None:
        """The best decode worker that reads from a prefill worker; a near one if it is as good.

        Args:
            prefill: the prefill worker.
            refused: the decode workers that do not read from it.
            decodes: the decode workers that can hold the request, the best first.
            demand: the request's.
            may_be: whether a worker may be chosen at all.
        """
        if len(refused) == len(self._rankings[WorkerRole.DECODE]):
            return None

        def reads(one: Candidate) -> bool:
            return one.incarnation not in refused and may_be(one)

        best = next(filter(reads, decodes), None)
        return best and self._neighbours.nearer(prefill, best, demand, reads)

    def _best_to_compute(self, role: WorkerRole, demand: Demand) -> Iterator[Candidate]:
        """The workers of a role that can compute the prompt of a request, the best first."""
        demand = replace(demand, marks=demand.reusable_on(role))
        return filter(demand.may_be_computed_by, self._best(role, demand))

    def _best(self, role: WorkerRole, demand: Demand) -> Iterator[Candidate]:
        """The workers of a role that can hold the request, the best first.

        The worker that has the KV of the request's session comes first.
        """
        ordered = self._affinity.order(role, self._rankings[role], demand)
        home = self._home(role, demand)
        if home is None:
            return ordered
        return chain((home,), (one for one in ordered if one.incarnation != home.incarnation))

    def _home(self, role: WorkerRole, demand: Demand) -> Candidate | None:
        """The worker that has the KV of the request's session; None if it may not be chosen.

        It may not if it cannot take requests now, has failed with this one, or is full.
        """
        one = self._rankings[role].get(demand.home) if demand.home else None
        if one is None or role is WorkerRole.PREFILL or not demand.trusts(one):
            return None
        is_full = one.headroom_tokens + demand.kept_tokens < demand.input_tokens
        return None if is_full or one.pool_tokens < demand.tokens_of(role) else one

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


class _Again(Generic[ItemT]):
    """An iterable over an iterator that may be repeated; it takes each item once."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = iter(items)
        self._taken: list[ItemT] = []

    def __iter__(self) -> Iterator[ItemT]:
        yield from self._taken
        for item in self._items:
            self._taken.append(item)
            yield item
