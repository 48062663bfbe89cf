"""Pairs of workers near each other are preferred, as long as load and prefixes allow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.placement.ranking import Candidate
from kvrelay.wire.prefixes import PrefixUpdate
from kvrelay.wire.worker_info import WorkerRole

from .cluster import collect, running
from .test_known_prefixes import PAGE_SIZE, info_of, marks
from .test_placement import candidate, chosen, placer
from .test_worker_order import Workers, pages_of
from .test_worker_order import candidate as roomy

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def decode_of(*decodes: Candidate, tokens: int = 1, suspects: str = "") -> str:
    """Which of them is paired with a prefill worker in rack a."""
    prefill = candidate("p", pool_tokens=10_000, locality="a")
    return chosen(placer(prefill=[prefill], decode=decodes), 1, tokens, suspects)[1]


NEAR = candidate("near", free=6, locality="a")
FAR = candidate("far", free=10, locality="b")


def test_a_near_decode_worker_is_taken_though_another_has_more_room() -> None:
    assert decode_of(NEAR, FAR) == "near"
    assert decode_of(replace(NEAR, locality="c"), FAR) == "far"


def test_the_best_of_several_near_ones_is_taken() -> None:
    assert decode_of(NEAR, candidate("next", free=8, locality="a"), FAR) == "next"


def test_where_no_locality_is_known_none_counts() -> None:
    assert decode_of(replace(NEAR, locality=""), replace(FAR, locality="")) == "far"
    prefill = candidate("p", pool_tokens=10_000)
    assert chosen(placer(prefill=[prefill], decode=[NEAR, FAR]))[1] == "far"


def test_a_near_one_without_room_for_the_request_is_left() -> None:
    assert decode_of(NEAR, FAR, tokens=96) == "near"
    assert decode_of(NEAR, FAR, tokens=97) == "far"


def test_a_near_one_with_clearly_more_requests_is_left() -> None:
    assert decode_of(candidate("near", running=2, free=6, locality="a"), FAR) == "near"
    assert decode_of(candidate("near", running=3, free=6, locality="a"), FAR) == "far"


def test_a_near_one_that_refuses_the_prefill_worker_or_is_suspect_is_left() -> None:
    assert decode_of(candidate("near", locality="a", refuses=["p"]), FAR) == "far"
    assert decode_of(NEAR, FAR, suspects="near") == "far"
    assert decode_of(NEAR, FAR, suspects="near p") == "far"
    assert decode_of(NEAR, FAR, suspects="near far") == "near"


def test_a_worker_that_is_gone_is_near_nobody() -> None:
    made = placer(prefill=[candidate("p", locality="a")], decode=[NEAR, FAR])
    assert chosen(made)[1] == "near"
    made.drop(DECODE, "near")
    assert chosen(made)[1] == "far"
    made.put(DECODE, NEAR)
    made.put(DECODE, candidate("near", free=0, locality="a"))
    assert chosen(made, total_tokens=16)[1] == "far", "its latest load counts"


def test_a_far_one_that_has_the_prefix_keeps_it() -> None:
    workers = Workers()
    workers.put(PREFILL, replace(roomy("p"), locality="a"))
    workers.put(DECODE, replace(roomy("near", room=90_000), locality="a"))
    workers.put(DECODE, replace(roomy("far"), locality="b"))
    assert workers.chosen(*pages_of(4))[1] == "near"
    have(workers, "far", *pages_of(2))
    assert workers.chosen(*pages_of(4))[1] == "far"
    have(workers, "near", *pages_of(2))
    assert workers.chosen(*pages_of(4))[1] == "near"


def have(workers: Workers, name: str, *pages: int) -> None:
    update = PrefixUpdate(0, PAGE_SIZE, begins=True, stored=marks(*pages))
    workers.prefixes.take(info_of(name, DECODE), update)


NAMES = ("prefill-0", "decode-0", "decode-1")


@pytest.mark.parametrize(
    ("localities", "expected"),
    [({}, "decode-0"), ({"prefill-0": "b", "decode-0": "a", "decode-1": "b"}, "decode-1")],
)
async def test_a_router_pairs_workers_that_say_that_they_are_near(
    config: RouterConfig, localities: dict[str, str], expected: str
) -> None:
    """Of equal ones the first by name is taken else."""
    async with running(config, *NAMES, localities=localities) as cluster:
        cluster.count()
        await collect(cluster.generate())
        assert [w.name for w in cluster.workers if w.submits] == ["prefill-0", expected]
