"""The worker that placement chooses for a request."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.router.placement import Candidate, choose_aggregated, choose_decode, choose_prefill
from kvrelay.wire.load import PoolCounts, WorkerLoad


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
    suspect: bool = False,
) -> Candidate:
    kv = PoolCounts("full", page_size, 10, free, 10 - free, 0, 0, 0, 0, promised)
    rows = PoolCounts("rows", 0, 999, 999, 0, 0, 0, 0, 0, 0)
    load = WorkerLoad(running_requests=running, pools=(kv, rows), growth_tokens=growth)
    return Candidate(worker, pool_tokens, load, backlog, suspect)


def test_prefill_goes_to_the_shortest_backlog() -> None:
    assert choose_prefill([candidate("a", backlog=9), b := candidate("b", backlog=8)], 1) is b


def test_equal_prefill_workers_are_taken_by_name() -> None:
    assert choose_prefill([candidate("b"), a := candidate("a")], 1) is a


def test_a_prompt_goes_only_where_it_fits() -> None:
    busy = candidate("a", backlog=900, pool_tokens=320)
    assert choose_prefill([busy, candidate("b")], 161) is busy
    assert choose_prefill([candidate("b")], 161) is None
    assert choose_prefill([], 1) is None


def test_decode_goes_to_the_most_unpromised_memory() -> None:
    promised = candidate("a", free=9, promised=5)
    assert choose_decode([promised, b := candidate("b", free=5)], 1) is b


def test_decode_counts_what_is_on_its_way_to_the_pool() -> None:
    assert choose_decode([candidate("a", backlog=17), b := candidate("b", free=9)], 1) is b


def test_pools_of_different_page_size_compare_in_tokens() -> None:
    assert choose_decode([candidate("a", page_size=1), b := candidate("b", free=1)], 1) is b


def test_equal_memory_goes_to_the_fewest_running_then_by_name() -> None:
    a, b, c = candidate("a", running=2), candidate("b", running=1), candidate("c", running=1)
    assert choose_decode([a, c, b], 1) is b


def test_an_output_goes_only_where_it_fits() -> None:
    assert choose_decode([candidate("a")], 161) is None


def test_growth_that_is_expected_counts_where_it_is_more_than_what_is_promised() -> None:
    grows = candidate("a", free=9, promised=5, growth=81)
    assert grows.headroom_tokens == 63
    assert choose_decode([grows, b := candidate("b", free=4)], 1) is b
    assert candidate("c", free=9, promised=5, growth=79).headroom_tokens == 64


def test_an_aggregated_worker_is_chosen_by_room_then_by_backlog() -> None:
    assert choose_aggregated([candidate("a", free=4), b := candidate("b", free=5)], 1) is b
    busy = candidate("a", free=5, backlog=16)
    assert choose_aggregated([busy, b := candidate("b", free=4)], 1) is b
    assert choose_aggregated([candidate("a")], 161) is None


@pytest.mark.parametrize("choose", [choose_prefill, choose_decode, choose_aggregated])
def test_a_suspect_is_chosen_only_if_there_is_nobody_else(choose: Any) -> None:
    suspect, busy = candidate("a", suspect=True), candidate("b", free=0, backlog=9)
    assert choose([suspect, busy], 1) is busy
    assert choose([suspect], 1) is suspect
