"""Prefixes are published as soon as they are written, while their request goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvrelay.decode_worker.request import HandedOverRequest
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.wire.output import EndReason
from tests.engine.simulation import SimRequest, Simulation, SimWorker, reference
from tests.engine.test_scenarios import CHUNK, one_pair, step_until

PROMPT = random.Random(0).choices(range(97), k=80)
WINDOWS = pytest.mark.parametrize("windows", [(None,), (None, 7)], ids=["full", "hybrid"])


def written(request: SimRequest, worker: SimWorker) -> int:
    mine = worker.context.requests.get(request.key)
    return mine.kv_written_len if mine else 0


def begin(simulation: Simulation, prompt: list[int], tokens: int) -> SimRequest:
    """A request of which so many tokens are computed, and the rest is not."""
    request = simulation.submit(prompt, 6)
    step_until(simulation, lambda: written(request, request.prefill) >= tokens)
    assert not request.tokens
    return request


def assert_right(*requests: SimRequest) -> None:
    for request in requests:
        windows = request.prefill.windows
        assert request.output == reference(request.prompt, request.max_tokens, windows)


@WINDOWS
@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_found_while_their_request_is_computed(seed: int, windows: Any) -> None:
    simulation = one_pair(seed, windows=windows)
    first = begin(simulation, PROMPT, 2 * CHUNK)
    second = simulation.submit([*PROMPT[: 2 * CHUNK], 1, 2, 3], 6)
    simulation.run()
    assert second.cached_tokens == 2 * CHUNK
    assert_right(first, second)
    simulation.assert_at_baseline()


def generates(request: SimRequest) -> bool:
    mine = request.decode.context.requests.get(request.key)
    return isinstance(mine, HandedOverRequest) and mine.every_step is not None


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_is_found_on_the_decode_side_while_its_request_generates(seed: int) -> None:
    simulation = one_pair(seed)
    first = simulation.submit(PROMPT, 200 - len(PROMPT))
    step_until(simulation, lambda: generates(first))
    read = sum(pull.num_pages for pull in simulation.pulls)
    second = simulation.submit([*PROMPT[:60], 1, 2, 3], 6)
    step_until(simulation, lambda: len(second.ends) == 2)
    assert first.decode.name not in first.ends, "it goes on"
    assert sum(pull.num_pages for pull in simulation.pulls) - read == 1
    simulation.run()
    assert_right(first, second)
    simulation.assert_at_baseline()


@WINDOWS
@pytest.mark.parametrize("seed", range(4))
def test_what_was_read_twice_is_stored_once(seed: int, windows: Any) -> None:
    """Both were granted before one of them was activated; together they fit, and grow."""
    simulation = one_pair(seed, pages=60, windows=windows, prefix_wait=0.0)
    read = simulation.end_read
    simulation.end_read = lambda worker: None  # type: ignore[method-assign]
    requests = [simulation.submit(PROMPT, 12) for _ in range(2)]
    decode = simulation.decodes[0]

    def both_computed() -> bool:
        live = [*decode.context.requests.values()]
        return len(live) == 2 and all(
            isinstance(one, HandedOverRequest) and one.announced_at for one in live
        )

    step_until(simulation, both_computed)
    assert decode.kv_cache.audit.page_counts()[0].held == 2 * len(PROMPT) // 4
    simulation.end_read = read  # type: ignore[method-assign]
    step_until(simulation, lambda: all(generates(request) for request in requests))
    counts = decode.kv_cache.audit.page_counts()[0]
    assert counts.cached_protected == len(PROMPT) // 4
    assert counts.held <= 2 * 3
    simulation.run()
    assert_right(*requests)
    simulation.assert_at_baseline()


@WINDOWS
@pytest.mark.parametrize("seed", range(4))
def test_what_is_settled_stays_found_when_its_request_is_aborted(seed: int, windows: Any) -> None:
    simulation = one_pair(seed, windows=windows)
    first = begin(simulation, PROMPT, 2 * CHUNK)
    settled = written(first, first.prefill)
    simulation.cancel(first, first.prefill)
    simulation.run()
    # What a forward still wrote at that time is not found.
    assert first.prefill.kv_cache.audit.page_counts()[0].cached_evictable == settled // 4
    second = simulation.submit(PROMPT, 6)
    simulation.run()
    assert second.cached_tokens == settled
    assert_right(second)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(6))
def test_a_duplicate_is_its_requests_own_until_its_stream_has_ended(seed: int) -> None:
    """Its decode worker reads the pages that were announced to it, wherever the index's are."""
    simulation = one_pair(seed, pages=80, prefix_wait=0.0)
    requests = [simulation.submit(PROMPT, 6) for _ in range(2)]
    prefill = simulation.prefills[0]
    tables: dict[str, list[int]] = {}
    turn = prefill.turn

    def watch() -> None:
        turn()
        for request in prefill.context.requests.values():
            if request.lease is None:
                continue
            (table,) = request.held.tables()
            before = tables.get(str(request.key), [])
            assert table[: len(before)] == before, "an announced page was replaced"
            tables[str(request.key)] = table

    prefill.turn = watch  # type: ignore[method-assign]
    simulation.run()
    assert_right(*requests)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_to_be_compared_is_published_after_the_verdict(seed: int) -> None:
    simulation = one_pair(seed, verify_pages=VerifyPages.ALL)
    request = simulation.submit(PROMPT, 6)
    prefill, before = request.prefill, 0
    while simulation.step():
        index = prefill.kv_cache.index.size(0)
        if request.key in prefill.context.requests:
            assert index == before, "it may turn out wrong"
    assert prefill.kv_cache.index.size(0) == len(PROMPT) // 4
    assert_right(request)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
def test_a_prompt_that_fails_is_found_by_nobody(aggregated: bool) -> None:
    """Its KV may be what has failed: the next one computes all of it."""
    simulation = one_pair(1, aggregated=aggregated)
    before = simulation.submit(PROMPT[:CHUNK], 6)
    simulation.run()
    first = begin(simulation, PROMPT, 3 * CHUNK)
    first.prefill.broken.add(first.key)
    simulation.run()
    assert first.ends[first.prefill.name].reason is EndReason.FAILED
    again = simulation.submit(PROMPT, 6)
    simulation.run()
    assert again.cached_tokens == CHUNK, "what it had found is not to blame"
    assert_right(before, again)
    simulation.assert_at_baseline()


def test_who_has_found_what_is_forgotten_goes_on() -> None:
    simulation = one_pair(2, pages=160)
    first = begin(simulation, [*PROMPT, *range(97), *range(97)], 2 * CHUNK)
    first.prefill.broken.add(first.key)
    second = simulation.submit([*PROMPT[: 2 * CHUNK], *range(40)], 6)
    step_until(simulation, lambda: written(second, second.prefill) >= 2 * CHUNK)
    assert not first.ends
    simulation.run()
    assert first.ends[first.prefill.name].reason is EndReason.FAILED
    again = simulation.submit(PROMPT, 6)
    simulation.run()
    assert second.cached_tokens == 2 * CHUNK
    assert again.cached_tokens == 0
    assert_right(second, again)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_is_published_and_nothing_else(seed: int, aggregated: bool) -> None:
    """After every pass of the engine, while forwards still write what comes next."""
    simulation = one_pair(seed, pages=200, aggregated=aggregated)
    worker, ahead = simulation.prefills[0], 0
    turn = worker.turn

    def watch() -> None:
        nonlocal ahead
        turn()
        for request in worker.context.requests.values():
            if request.lease is not None and request.kv_written_len <= request.input_len:
                written = min(request.kv_written_len, request.input_len)
                assert request.held.cache_protected_len == written // 4 * 4
                ahead += request.held.kv_committed_len > written

    worker.turn = watch  # type: ignore[method-assign]
    prompts = [[*range(number, number + 90)] for number in range(5)]
    requests = [simulation.submit(prompt, 3) for prompt in prompts]
    simulation.run()
    assert ahead
    assert_right(*requests)
    simulation.assert_at_baseline()
