"""The placement policy: which workers serve an attempt, and which of them computes its prompt.

`Placer.choose` takes these steps, in this order:

1. *Who may serve.* A worker that takes requests and whose pool can hold this one. A prefill and a
   decode worker serve as a pair, unless the second refuses to read from the first. An aggregated
   worker serves alone; with `decodes_alone`, a decode worker may, too. An aggregated worker that
   is the home of the request's session comes before any pair.
2. *The order of a role's workers.* The home of the request's session comes first, while it has
   room. Then a few are weighed by their load and their cached prefix of the prompt (`score`): the
   least loaded, and those with the longest prefixes. The others follow by load. Workers that an
   earlier attempt has failed with come last.
3. *The pair.* The first prefill worker from which a decode worker reads, and the first of those. A
   decode worker near the prefill worker is taken instead if it is about as good. A pair without a
   suspect comes before all others. Where there is no pair, one worker serves alone.
4. *Who of the pair computes the prompt.* The prefill worker, unless decode workers compute prompts,
   too. Then it is the one that no earlier attempt has failed with. If that does not decide, it is
   the one that is expected to have the first token sooner (`decide`).
5. *A deadline.* If the first token is expected after it, the soonest of all workers computes the
   prompt, wherever the prefix is. The request is refused if even that one is too late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from kvrelay.pacing.chunk_size import NO_TARGETS, LatencyTargets
from kvrelay.router.placement.chosen import Chosen, Reason, Shortage
from kvrelay.router.placement.deadlines import DeadlineCheck
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.local_prompts import Side, decide, expect_lent
from kvrelay.router.placement.order import WorkerOrder
from kvrelay.router.placement.ranking import Candidate, Repeatable
from kvrelay.router.placement.ready_workers import ReadyWorkers
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The settings of the policy."""

    decodes_alone: bool = False
    """Whether decode workers compute prompts, too, where that seems best."""
    targets: LatencyTargets = NO_TARGETS
    """The latencies that decode workers keep, by which they get prompts."""
    deadline_margin: float = 0.0
    """The most expected seconds until the first token, in multiples of the time that the deadline
    leaves; 0: deadlines change nothing."""


class Placer:
    """The choice among the ready workers; it finds some whenever any can serve.

    Args:
        workers: the ready workers.
        rules: the settings.
    """

    def __init__(self, workers: ReadyWorkers, rules: PlacementRules) -> None:
        self._workers = workers
        self._rules = rules
        self._order = WorkerOrder(workers)
        self._alone = (WorkerRole.AGGREGATED, *[WorkerRole.DECODE] * rules.decodes_alone)
        computing = (WorkerRole.PREFILL, *self._alone)
        self._deadlines = DeadlineCheck(workers, self._order, computing, rules.deadline_margin)

    @property
    def ready(self) -> bool:
        """Whether a pair, or a worker that needs no other, can take requests."""
        ready = {role for role in WorkerRole if self._workers.ranking(role)}
        return {WorkerRole.PREFILL, WorkerRole.DECODE} <= ready or not ready.isdisjoint(self._alone)

    def choose(self, demand: Demand, seconds_left: float | None = None) -> Chosen | Shortage:
        """Choose the workers for an attempt, by the steps above.

        Args:
            demand: the attempt's.
            seconds_left: seconds until the request's deadline; None: it has none.

        Raises:
            DeadlineTooNear: no first token is expected in time.
        """
        chosen = self._choose(demand)
        if isinstance(chosen, Shortage) or seconds_left is None or not self._rules.deadline_margin:
            return chosen
        return self._deadlines.choose(chosen, demand, seconds_left, self._choose)

    def _choose(self, demand: Demand) -> Chosen | Shortage:
        """Choose without regard to a deadline."""
        home = self._order.home(WorkerRole.AGGREGATED, demand)
        if home is not None and demand.may_be_computed_by(home):
            return _serve_alone(home, demand)
        pair = self._first_pair(demand, demand.trusts) if demand.suspects else None
        if not isinstance(pair, tuple):
            pair = self._first_pair(demand, lambda one: True)
        if isinstance(pair, tuple):
            return self._choose_computing(*pair, demand)
        ordered = chain.from_iterable(self._order.computing(role, demand) for role in self._alone)
        best = next(ordered, None)
        if best is not None:
            return _serve_alone(best, demand)
        return Shortage(WorkerRole.DECODE) if self._rules.decodes_alone else pair

    def _first_pair(
        self, demand: Demand, may_be: Callable[[Candidate], bool]
    ) -> tuple[Candidate, Candidate] | Shortage:
        """Choose the first prefill worker that has a reader, and its reader."""
        decodes = Repeatable(filter(may_be, self._order.holding(WorkerRole.DECODE, demand)))
        shortage = Shortage(WorkerRole.PREFILL)
        for prefill in filter(may_be, self._order.computing(WorkerRole.PREFILL, demand)):
            if next(iter(decodes), None) is None:
                return Shortage(WorkerRole.DECODE)
            refused = self._workers.refusals_of(prefill)
            asked = decodes if self._workers.any_reads(prefill) else ()
            best = next((one for one in asked if one.incarnation not in refused), None)
            if best is not None:
                return prefill, self._order.nearer(prefill, best, refused, demand)
            shortage = Shortage(WorkerRole.DECODE, next(iter(refused.values()), shortage.refusal))
        return shortage

    def _choose_computing(self, prefill: Candidate, decode: Candidate, demand: Demand) -> Chosen:
        """Choose the worker of a pair that computes the prompt."""
        by_prefill, by_decode = partial(Chosen, decode, prefill), partial(Chosen, decode, None)
        lendable, per_second = self._lendable(prefill, decode, demand)
        if not self._rules.decodes_alone:
            if not per_second:
                return by_prefill(Reason.MODE)
            there = self._side(WorkerRole.PREFILL, prefill, demand).lent(lendable, per_second)
            return by_prefill(Reason.MODE, expect_lent(demand.input_tokens, there))
        if demand.computed_by:
            return by_prefill(Reason.SOONER)
        if (suspect := demand.suspect_of(prefill, decode)) is not None:
            return (by_decode if suspect is WorkerRole.PREFILL else by_prefill)(Reason.SUSPECT)
        there = self._side(WorkerRole.PREFILL, prefill, demand)
        here = self._side(WorkerRole.DECODE, decode, demand)
        if per_second:
            there = there.lent(lendable, per_second)
        decision = decide(demand.input_tokens, there, here, self._rules.targets)
        chosen = by_decode if decision.by_decode else by_prefill
        return chosen(decision.reason, decision.lent_tokens)

    def _lendable(self, prefill: Candidate, decode: Candidate, demand: Demand) -> tuple[int, float]:
        """The tokens of the prompt that a decode worker has and a prefill worker has not.

        Returns:
            Their number from the prompt's start on, and how many of them the prefill worker reads
            in a second; 0: it is lent none.
        """
        if WorkerRole.PREFILL in demand.in_full_on:
            return 0, 0.0
        here = max(demand.kept_on(decode.incarnation), self._workers.hit_tokens(decode, demand))
        if here <= self._workers.hit_tokens(prefill, demand):
            return 0, 0.0
        mine = (peer for peer in decode.load.peers if peer.incarnation == prefill.incarnation)
        return here, next((peer.lent_tokens_per_second for peer in mine), 0.0)

    def _side(self, role: WorkerRole, one: Candidate, demand: Demand) -> Side:
        cached = self._workers.hit_tokens(one, demand.to_compute_on(role))
        if role not in demand.in_full_on:
            cached = max(cached, demand.kept_on(one.incarnation))
        return Side(self._workers.queue_of(one), cached, one.num_requests)


def _serve_alone(one: Candidate, demand: Demand) -> Chosen:
    return Chosen(one, None, Reason.SOONER if demand.computed_by else Reason.NO_CHOICE)
