"""The workers that placement chooses for a request."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.placement.chosen import Chosen, Shortage
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.ranking import Candidate
from kvrelay.wire.load import PeerTransport, PoolCounts, WorkerLoad
from kvrelay.wire.worker_info import WorkerRole

from .ready import Ready

PREFILL, DECODE, AGGREGATED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.AGGREGATED


def candidate(
    worker: str,
    *,
    backlog: int = 0,
    free: int = 10,
    promised: int = 0,
    running: int = 0,
    pool_tokens: int = 160,
    page_size: int = 16,
    growth: int = 0,
    refuses: Iterable[str] = (),
    locality: str = "",
) -> Candidate:
    kv = PoolCounts("full", page_size, 10, free, 10 - free, 0, 0, 0, 0, promised)
    rows = PoolCounts("rows", 0, 999, 999, 0, 0, 0, 0, 0, 0)
    peers = tuple(PeerTransport(peer, refusal=f"{peer} is slow") for peer in refuses)
    load = WorkerLoad(running_requests=running, pools=(kv, rows), growth_tokens=growth, peers=peers)
    return Candidate(worker, worker, pool_tokens, load, backlog, backlog, running, locality)


def placer(**workers: Iterable[Candidate]) -> Ready:
    """Of these workers, by role."""
    made = Ready()
    for role, candidates in workers.items():
        for one in candidates:
            made.put(WorkerRole(role), one)
    return made


def chosen(
    placer: Ready, input_tokens: int = 1, total_tokens: int = 1, suspects: str = ""
) -> tuple[str, str]:
    """The names of the prefill worker, empty if there is none, and of the one that decodes."""
    pair = placer.choose(Demand(input_tokens, total_tokens, frozenset(suspects.split())))
    assert isinstance(pair, Chosen), pair
    return pair.prefill.worker if pair.prefill else "", pair.decode.worker


def prefill_of(*candidates: Candidate, tokens: int = 1, suspects: str = "") -> str:
    """Which of them is chosen to prefill."""
    decode = candidate("decode", pool_tokens=10_000)
    return chosen(placer(prefill=candidates, decode=[decode]), tokens, 1, suspects)[0]


def decode_of(*candidates: Candidate, tokens: int = 1, suspects: str = "") -> str:
    """Which of them is chosen to decode."""
    prefill = candidate("prefill", pool_tokens=10_000)
    return chosen(placer(prefill=[prefill], decode=candidates), 1, tokens, suspects)[1]


def aggregated_of(*candidates: Candidate, tokens: int = 1, suspects: str = "") -> str:
    """Which of them is chosen, when there are no pairs."""
    return chosen(placer(aggregated=candidates), 1, tokens, suspects)[1]


def test_prefill_goes_to_the_shortest_backlog() -> None:
    assert prefill_of(candidate("a", backlog=9), candidate("b", backlog=8)) == "b"


def test_equal_prefill_workers_are_taken_by_name() -> None:
    assert prefill_of(candidate("b"), candidate("a")) == "a"


def test_a_prompt_goes_only_where_it_fits() -> None:
    busy = candidate("a", backlog=900, pool_tokens=320)
    assert prefill_of(busy, candidate("b"), tokens=161) == "a"
    small = placer(prefill=[candidate("b")], decode=[candidate("d")])
    assert small.choose(Demand(161, 1)) == Shortage(PREFILL)
    assert Ready().choose(Demand(1, 1)) == Shortage(PREFILL)


def test_decode_goes_to_the_most_unpromised_memory() -> None:
    assert decode_of(candidate("a", free=9, promised=5), candidate("b", free=5)) == "b"


def test_decode_counts_what_is_on_its_way_to_the_pool() -> None:
    assert decode_of(candidate("a", backlog=17), candidate("b", free=9)) == "b"


def test_pools_of_different_page_size_compare_in_tokens() -> None:
    assert decode_of(candidate("a", page_size=1), candidate("b", free=1)) == "b"


def test_equal_memory_goes_to_the_fewest_running_then_by_name() -> None:
    a, b, c = candidate("a", running=2), candidate("b", running=1), candidate("c", running=1)
    assert decode_of(a, c, b) == "b"


def test_an_output_goes_only_where_it_fits() -> None:
    small = placer(prefill=[candidate("p")], decode=[candidate("a")])
    assert small.choose(Demand(1, 161)) == Shortage(DECODE)


def test_growth_that_is_expected_counts_where_it_is_more_than_what_is_promised() -> None:
    grows = candidate("a", free=9, promised=5, growth=81)
    assert grows.headroom_tokens == 63
    assert decode_of(grows, candidate("b", free=4)) == "b"
    assert candidate("c", free=9, promised=5, growth=79).headroom_tokens == 64


def test_an_aggregated_worker_is_chosen_by_room_then_by_backlog() -> None:
    assert aggregated_of(candidate("a", free=4), candidate("b", free=5)) == "b"
    busy = candidate("a", free=5, backlog=16)
    assert aggregated_of(busy, candidate("b", free=4)) == "b"
    assert placer(aggregated=[candidate("a")]).choose(Demand(1, 161)) == Shortage(PREFILL)


def test_pairs_come_before_aggregated_workers() -> None:
    alone = candidate("a", pool_tokens=320)
    both = placer(prefill=[candidate("p")], decode=[candidate("d")], aggregated=[alone])
    assert chosen(both) == ("p", "d")
    assert chosen(both, 1, 161) == ("", "a")


@pytest.mark.parametrize("choose", [prefill_of, decode_of, aggregated_of])
def test_a_suspect_is_chosen_only_if_there_is_nobody_else(choose: object) -> None:
    assert callable(choose)
    suspect, busy = candidate("a"), candidate("b", free=0, backlog=9)
    assert choose(suspect, busy, suspects="a") == "b"
    assert choose(suspect, suspects="a") == "a"


def test_only_the_worker_that_is_asked_for_computes_the_prompt() -> None:
    prefills = [candidate("p0"), candidate("p1", backlog=9)]
    decodes = [candidate("d0", refuses=["p1"]), candidate("d1", free=5)]
    workers = placer(prefill=prefills, decode=decodes, aggregated=[candidate("a0")])
    for name, pair in (("p1", ("p1", "d1")), ("a0", ("", "a0"))):
        found = workers.choose(Demand(1, 1, computed_by=name))
        assert isinstance(found, Chosen)
        assert (found.prefill.worker if found.prefill else "", found.decode.worker) == pair
    assert isinstance(workers.choose(Demand(1, 1, computed_by="gone")), Shortage)


def test_a_pair_without_a_suspect_comes_before_the_one_with_the_best_prefill_worker() -> None:
    prefills = [candidate("p"), candidate("q", backlog=5)]
    made = placer(prefill=prefills, decode=[candidate("c"), candidate("d", refuses=["p"])])
    assert chosen(made, suspects="c") == ("q", "d")
    assert chosen(made, suspects="c q") == ("p", "c")


def test_a_pair_that_refuses_each_other_is_not_chosen() -> None:
    prefills = [candidate("p"), candidate("q", backlog=5)]
    decodes = [candidate("c", refuses=["p"]), candidate("d", free=1, refuses=["p", "q"])]
    made = placer(prefill=prefills, decode=decodes)
    assert chosen(made) == ("q", "c")
    assert not made.put(DECODE, candidate("c", free=9, refuses=["p"]))
    assert made.put(DECODE, candidate("c", refuses=["p", "q"]))
    assert made.choose(Demand(1, 1)) == Shortage(DECODE, "q is slow")
    assert made.put(DECODE, candidate("d", free=1, refuses=["q"]))
    assert chosen(made) == ("p", "d")
    assert made.drop(DECODE, "d")
    assert not made.drop(DECODE, "d")
    assert made.choose(Demand(1, 1)) == Shortage(DECODE, "q is slow")
    assert made.put(DECODE, candidate("d", free=1))
    assert chosen(made) == ("p", "d")


@dataclass
class Naive:
    """What placement is to choose, by its definition: it looks at every worker and every pair."""

    workers: dict[WorkerRole, dict[str, Candidate]] = field(
        default_factory=lambda: {role: {} for role in WorkerRole}
    )

    def choose(self, demand: Demand) -> tuple[str, str] | None:
        """The best pair, the prefill worker first; then the best aggregated worker."""
        pairs = [
            (
                bool({p.incarnation, d.incarnation} & set(demand.suspects)),
                self._prefill_key(p, demand),
                self._decode_key(d, demand),
            )
            for p in self.workers[PREFILL].values()
            for d in self.workers[DECODE].values()
            if p.pool_tokens >= demand.input_tokens and d.pool_tokens >= demand.total_tokens
            if p.incarnation not in d.load.refused_peers
        ]
        if pairs:
            _, prefill, decode = min(pairs)
            return str(prefill[-1]), str(decode[-1])
        alone = [
            (c.incarnation in demand.suspects, -c.headroom_tokens, c.backlog_tokens, c.worker)
            for c in self.workers[AGGREGATED].values()
            if c.pool_tokens >= demand.total_tokens
        ]
        return ("", min(alone)[-1]) if alone else None

    @staticmethod
    def _prefill_key(one: Candidate, demand: Demand) -> tuple[object, ...]:
        return (one.incarnation in demand.suspects, one.backlog_tokens, one.worker)

    @staticmethod
    def _decode_key(one: Candidate, demand: Demand) -> tuple[object, ...]:
        suspect, running = one.incarnation in demand.suspects, one.load.running_requests
        return (suspect, -one.headroom_tokens, running, one.worker)


@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_choices_are_those_of_the_definition_whatever_has_changed(rng: random.Random) -> None:
    naive, made = Naive(), Ready()
    names = {role: [f"{role}-{n}" for n in range(rng.randint(1, 6))] for role in WorkerRole}
    for _ in range(60):
        role = rng.choice(list(WorkerRole))
        name = rng.choice(names[role])
        if rng.random() < 0.2:
            assert made.drop(role, name) == (naive.workers[role].pop(name, None) is not None)
        else:
            refuses = [p for p in names[PREFILL] if role is DECODE and rng.random() < 0.4]
            one = candidate(
                name,
                backlog=rng.randint(0, 3) * 16,
                free=rng.randint(0, 4),
                running=rng.randint(0, 2),
                pool_tokens=rng.choice([160, 160, 320]),
                refuses=refuses,
            )
            made.put(role, one)
            naive.workers[role][name] = one
        suspects = {name for of in names.values() for name in of if rng.random() < 0.3}
        demand = Demand(rng.choice([1, 161, 321]), rng.choice([1, 161]), suspects)
        expected, pair = naive.choose(demand), made.choose(demand)
        if expected is None:
            assert isinstance(pair, Shortage)
        else:
            assert chosen(made, demand.input_tokens, demand.total_tokens, " ".join(suspects)) == (
                expected
            )


def fleet(number: int) -> Ready:
    """So many workers of each role, some of which refuse each other; one takes long requests."""
    rng = random.Random(number)
    made = Ready()
    for n in range(number):
        made.put(PREFILL, candidate(f"p{n}", backlog=rng.randrange(1000), pool_tokens=320))
        refuses = [f"p{rng.randrange(number)}" for _ in range(3)]
        made.put(DECODE, candidate(f"d{n}", free=rng.randrange(10), refuses=refuses))
    made.put(DECODE, candidate("long", free=0, pool_tokens=320))
    return made


@pytest.mark.parametrize("total_tokens", [160, 320, 640])
def test_a_choice_among_many_workers_costs_little_more_than_among_few(total_tokens: int) -> None:
    def seconds(made: Ready) -> float:
        """Of the fastest of a few hundred choices, each after a change of a load."""
        times = []
        for n in range(300):
            begun = time.perf_counter()
            made.put(DECODE, candidate("d0", free=n % 10))
            made.choose(Demand(160, total_tokens))
            times.append(time.perf_counter() - begun)
        return min(times)

    # All pairs would take 10,000 times as long, all workers 100 times.
    few, many = fleet(5), fleet(500)
    assert seconds(many) < (3 if total_tokens == 160 else 40) * seconds(few)
