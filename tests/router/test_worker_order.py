"""Cached prefixes weighed against load: placement follows hits as long as nobody waits for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from kvrelay.router.placement.chosen import Chosen
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ranking import Candidate
from kvrelay.wire.load import PeerTransport, PoolCounts, WorkerLoad
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.worker_info import WorkerRole

from .ready import Ready
from .test_known_prefixes import PAGE_SIZE, info_of, marks, prompt_of

PREFILL, DECODE, AGGREGATED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.AGGREGATED
ROOM_TOKENS = 100_000


def candidate(
    name: str,
    *,
    backlog: int = 0,
    room: int = ROOM_TOKENS,
    requests: int = 0,
    pool_tokens: int = ROOM_TOKENS,
    refuses: Iterable[str] = (),
) -> Candidate:
    pool = PoolCounts("full", 1, ROOM_TOKENS, room, ROOM_TOKENS - room, 0, 0, 0, 0, 0)
    peers = tuple(PeerTransport(peer, refusal="slow") for peer in refuses)
    load = WorkerLoad(running_requests=requests, pools=(pool,), peers=peers)
    return Candidate(name, name, pool_tokens, load, backlog, 0, requests)


class Workers:
    """Ready workers, what they have cached, and the placement that chooses among them."""

    def __init__(self) -> None:
        self.prefixes = KnownPrefixes(10_000)
        self.ready = Ready(self.prefixes)

    def put(self, role: WorkerRole, one: Candidate, *cached: int) -> Workers:
        """A worker as it is now, that has the prefix of these pages."""
        update = PrefixUpdate(0, PAGE_SIZE, begins=True, stored=marks(*cached))
        self.prefixes.take(info_of(one.incarnation, role), update)
        self.ready.put(role, one)
        return self

    def chosen(self, *pages: int, suspects: str = "", namespace: str = "") -> tuple[str, str]:
        prompt = prompt_of(*pages)
        marks = self.prefixes.marks_of(prompt, namespace)
        tokens = len(prompt)
        pair = self.ready.choose(Demand(tokens, tokens + 8, frozenset(suspects.split()), marks))
        assert isinstance(pair, Chosen)
        return pair.prefill.worker if pair.prefill else "", pair.decode.worker


def pages_of(number: int) -> tuple[int, ...]:
    return tuple(range(1, number + 1))


@pytest.mark.parametrize(("backlog", "expected"), [(0, "hit"), (1279, "hit"), (1281, "idle")])
def test_a_prompt_goes_where_its_prefix_is_unless_it_would_wait_for_twice_what_that_saves(
    backlog: int, expected: str
) -> None:
    workers = Workers().put(PREFILL, candidate("hit", backlog=backlog), *pages_of(10))
    workers.put(PREFILL, candidate("idle")).put(DECODE, candidate("d"))
    assert workers.chosen(*pages_of(12)) == (expected, "d")
    assert workers.chosen(9, *pages_of(11))[0] == ("hit" if backlog == 0 else "idle")


def test_another_tenants_prefix_attracts_nobody() -> None:
    workers = Workers().put(PREFILL, candidate("hit", backlog=1), *pages_of(10))
    workers.put(PREFILL, candidate("idle")).put(DECODE, candidate("d"))
    assert workers.chosen(*pages_of(10)) == ("hit", "d")
    assert workers.chosen(*pages_of(10), namespace="other/") == ("idle", "d")


def test_the_hit_is_found_among_many_that_are_less_loaded() -> None:
    workers = Workers().put(DECODE, candidate("d"))
    for number in range(50):
        workers.put(PREFILL, candidate(f"p{number:02}"))
    workers.put(PREFILL, candidate("busy", backlog=600), *pages_of(10))
    assert workers.chosen(*pages_of(10)) == ("busy", "d")
    assert workers.chosen(7) == ("p00", "d")


def test_of_many_that_have_the_prefix_the_least_loaded_gets_it() -> None:
    workers = Workers().put(DECODE, candidate("d"))
    for number in range(50):
        workers.put(PREFILL, candidate(f"p{number:02}", backlog=1000 - number), *pages_of(10))
    workers.put(PREFILL, candidate("idle", backlog=900))
    assert workers.chosen(*pages_of(10)) == ("p49", "d")


@pytest.mark.parametrize(
    ("room", "requests", "expected"),
    [
        (ROOM_TOKENS, 0, "hit"),
        (ROOM_TOKENS - 639, 0, "hit"),
        (ROOM_TOKENS - 641, 0, "idle"),
        (ROOM_TOKENS - 100, 1, "hit"),
        (ROOM_TOKENS - 100, 2, "idle"),
    ],
)
def test_a_decode_worker_that_has_the_prefix_is_chosen_unless_it_is_busier(
    room: int, requests: int, expected: str
) -> None:
    workers = Workers().put(DECODE, candidate("hit", room=room, requests=requests), *pages_of(10))
    workers.put(DECODE, candidate("idle")).put(PREFILL, candidate("p"))
    assert workers.chosen(*pages_of(10)) == ("p", expected)


def test_an_aggregated_worker_is_chosen_by_its_prefixes_too() -> None:
    workers = Workers().put(AGGREGATED, candidate("z"), *pages_of(4))
    workers.put(AGGREGATED, candidate("a"))
    assert workers.chosen(*pages_of(4)) == ("", "z")
    assert workers.chosen(9, 9) == ("", "a")


def test_who_cannot_hold_the_request_is_suspect_or_is_refused_is_not_chosen_for_a_hit() -> None:
    workers = Workers().put(PREFILL, candidate("small", pool_tokens=100), *pages_of(10))
    workers.put(PREFILL, candidate("suspect"), *pages_of(10))
    workers.put(PREFILL, candidate("refused"), *pages_of(9))
    workers.put(PREFILL, candidate("other", backlog=9)).put(
        DECODE, candidate("d", refuses=["refused"])
    )
    assert workers.chosen(*pages_of(10), suspects="suspect") == ("other", "d")
    assert workers.chosen(*pages_of(10)) == ("suspect", "d")
    workers.ready.drop(PREFILL, "other")
    assert workers.chosen(*pages_of(10), suspects="suspect") == ("suspect", "d")


def test_a_suspect_comes_last_though_it_has_the_prefix() -> None:
    workers = Workers().put(DECODE, candidate("d", refuses=[f"p{n}" for n in range(6)]))
    workers.put(PREFILL, candidate("suspect"), *pages_of(10))
    for number in range(8):
        hit = pages_of(5) if number == 0 else ()
        workers.put(PREFILL, candidate(f"p{number}", backlog=1 + number), *hit)
    assert workers.chosen(*pages_of(10), suspects="suspect") == ("p6", "d")


def test_those_that_cannot_be_chosen_hide_nobody_who_has_the_prefix() -> None:
    workers = Workers().put(DECODE, candidate("d"))
    for number in range(8):
        workers.put(PREFILL, candidate(f"gone{number}"), *pages_of(10))
        workers.ready.drop(PREFILL, f"gone{number}")
        workers.put(PREFILL, candidate(f"small{number}", pool_tokens=100), *pages_of(10))
        workers.put(PREFILL, candidate(f"suspect{number}"), *pages_of(10))
        workers.put(PREFILL, candidate(f"idle{number}"))
    workers.put(PREFILL, candidate("hit", backlog=9), *pages_of(8))
    suspects = " ".join(f"suspect{number}" for number in range(8))
    assert workers.chosen(*pages_of(10), suspects=suspects) == ("hit", "d")


def test_one_hot_prefix_does_not_pile_all_requests_on_one_worker() -> None:
    """Requests that come faster than one worker computes their own parts."""
    names, rng = ["a", "b", "c", "d"], random.Random(0)
    workers, backlog = Workers(), dict.fromkeys(names, 0)
    workers.put(PREFILL, candidate("a"), *pages_of(20))
    for name in names[1:]:
        workers.put(PREFILL, candidate(name))
    workers.put(DECODE, candidate("decode"))
    placed: Counter[str] = Counter()
    computed, apart = 0, 0
    for number in range(400):
        prompt = [*pages_of(20), *[1000 + number] * 4]
        chosen, _ = workers.chosen(*prompt)
        placed[chosen] += 1
        known = workers.prefixes.marks_of(prompt_of(*prompt), "")
        left = len(prompt) * PAGE_SIZE - workers.prefixes.hit_tokens(chosen, known)
        computed += left
        backlog[chosen] += left
        apart = max(apart, max(backlog.values()) - min(backlog.values()))
        workers.prefixes.expect(chosen, known)
        for name in names:  # what each computes until the next request comes
            backlog[name] = max(0, backlog[name] - rng.randint(50, 90))
            workers.ready.put(PREFILL, candidate(name, backlog=backlog[name]))
    assert min(placed[name] for name in names) > 60
    # A worker without the prefix takes requests before another one has twice that more to do.
    assert apart <= (2 * 20 + 24) * PAGE_SIZE
    # The prefix is computed by the other three once, and is cached from then on.
    assert computed == (400 * 4 + 3 * 20) * PAGE_SIZE
