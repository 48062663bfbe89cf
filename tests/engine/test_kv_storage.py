"""What one worker has computed, another reads from storage, with the same tokens.

The model counts: a page that comes back with other bytes changes the tokens.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.engine.scheduler.request import Request
from kvrelay.engine.scheduler.tier_loads import TierLoads
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.storage.storage_orders import Fetch, LookUp, StorageOrder, Store
from tests.engine.simulation import Simulation
from tests.engine.simulation.storage import MemoryStore, SharedPages
from tests.engine.simulation.worker import PAGE_BYTES, SimWorker
from tests.engine.test_host_tier import (
    PROMPTS,
    Clocked,
    RealModel,
    ask,
    computed_tokens,
    every_mode,
    in_little_memory,
    real_models,
)
from tests.engine.test_modes import expected, run_load
from tests.known import known
from tests.pairwise import few


def with_storage(shared: SharedPages, page_size: int, **mode: Any) -> Simulation:
    def make(worker: SimWorker) -> MemoryStore:
        return MemoryStore(shared, lambda: worker.counting.host_kv)

    return in_little_memory(page_size, make_store=make, **mode)


def storage_counts(simulation: Simulation, name: str) -> int:
    tiers = [known(known(worker.tier).storage) for worker in simulation.workers]
    return sum(getattr(tier.counts, name) for tier in tiers)


def some_prompts(seed: int, count: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(48)] for _ in range(count)]


@few(2)
@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_worker_that_never_saw_a_prefix_reads_it(page_size: int, aggregated: bool) -> None:
    shared: SharedPages = {}
    first = with_storage(shared, page_size, aggregated=aggregated, workers=1)
    prompts = some_prompts(1)
    ask(first, prompts, 4)
    ask(first, prompts, 4)
    assert storage_counts(first, "written_pages")
    first.assert_at_baseline()
    second = with_storage(shared, page_size, aggregated=aggregated, workers=1)
    ask(second, prompts, 4)
    assert storage_counts(second, "loaded_pages") >= 5 * (44 // page_size)
    assert computed_tokens(second) < computed_tokens(first) / 4
    second.assert_at_baseline()


def test_what_is_asked_for_once_is_not_written_while_the_host_has_room() -> None:
    shared: SharedPages = {}
    simulation = with_storage(shared, 4, aggregated=True, workers=1)
    prompts = some_prompts(2)
    ask(simulation, prompts, 4)
    assert not shared
    ask(simulation, prompts[:1], 4)
    assert len(shared) == 47 // 4, "the one that was asked for again; its last token is computed"


def test_what_the_host_may_evict_is_written() -> None:
    shared: SharedPages = {}
    simulation = with_storage(shared, 4, aggregated=True, workers=1, host_pages=26)
    prompts = some_prompts(3)
    ask(simulation, prompts, 4)
    assert len(shared) > 26
    ask(simulation, prompts, 4)
    assert storage_counts(simulation, "loaded_pages")
    simulation.assert_at_baseline()


@few(2)
@every_mode
@pytest.mark.parametrize("host_pages", [7, 60])
def test_tokens_do_not_depend_on_storage(
    overlap: bool, speculation: Speculation, retract_every: int, aggregated: bool, host_pages: int
) -> None:
    """Shared by workers of several clusters, one after the other."""
    for page_size in (1, 4):
        shared: SharedPages = {}
        for _ in range(2):
            simulation = with_storage(
                shared,
                page_size,
                host_pages=host_pages,
                aggregated=aggregated,
                overlap=overlap,
                speculation=speculation,
                debug_retract_every=retract_every,
                local=0.0 if aggregated else 0.5,
            )
            run_load(simulation, page_size, count=12, choices=3)


@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
def test_storage_that_fails_costs_no_token_and_no_page(aggregated: bool) -> None:
    shared: SharedPages = {}
    first = with_storage(shared, 4, aggregated=aggregated, workers=1)
    prompts = some_prompts(4)
    ask(first, prompts * 2, 4)
    assert shared
    for fails in (True, False):
        again = with_storage(shared, 4, aggregated=aggregated, workers=1)
        for worker in again.workers:
            known(worker.storage).fails = fails
        ask(again, prompts, 4)
        assert bool(storage_counts(again, "loaded_pages")) is not fails
        again.assert_at_baseline()


def test_what_is_there_under_another_hash_is_not_read() -> None:
    """A page of other tokens under the hash that is asked for."""
    shared: SharedPages = {}
    first, prompts = with_storage(shared, 4, aggregated=True, workers=1), some_prompts(5)
    ask(first, prompts * 2, 4)
    keys = list(shared)
    forged = {key: shared[other] for key, other in zip(keys, keys[1:] + keys[:1], strict=True)}
    second = with_storage(forged, 4, aggregated=True, workers=1)
    ask(second, prompts, 4)
    assert not storage_counts(second, "loaded_pages")
    second.assert_at_baseline()


def test_a_forward_that_fails_leaves_nothing_in_storage() -> None:
    shared: SharedPages = {}
    simulation = with_storage(shared, 4, aggregated=True, workers=1, host_pages=20)
    worker, prompt = simulation.workers[0], list(range(60))
    simulation.submit(prompt, 4)
    while not shared:
        assert simulation.step()
    while not worker.steps:
        assert simulation.step()
    worker.fail_step()
    worker.turn()
    while known(worker.storage).orders:
        worker.end_storage()
        worker.turn()
    assert not shared
    simulation.run()
    ask(simulation, [prompt], 4)
    simulation.assert_at_baseline()


@few(1)
@real_models
def test_a_real_model_gives_the_same_tokens_from_files(
    tmp_path: Path, architecture: str, bytes_a_page: int, aggregated: bool
) -> None:
    """By NIXL, on another worker than the one that has written them, in float32."""
    model = RealModel(tmp_path, architecture, bytes_a_page, aggregated)
    loaded = []
    for _ in range(2):
        simulation = model.serve(
            host_kv_memory=64 * bytes_a_page,
            kv_storage=str(tmp_path / "storage"),
            kv_storage_size=16 << 20,
        )
        model.ask(simulation)
        loaded.append(storage_counts(simulation, "loaded_pages"))
        for worker in simulation.workers:
            known(worker.storage).store.close()
    assert loaded[1] > loaded[0]


# Never slower: under a virtual clock


class Stored(Clocked):
    """See `Clocked`; its host is fast, and below it is storage that others have filled.

    Args:
        shared: what storage has.
        believed: pages a second of storage, as measured at the start.
        real: as it really gives them.
    """

    def __init__(
        self, shared: SharedPages, believed: float = math.inf, real: float = math.inf
    ) -> None:
        self.pages_a_second = real

        def make(worker: SimWorker) -> MemoryStore:
            return MemoryStore(shared, lambda: worker.counting.host_kv)

        super().__init__(400, make_store=make)
        known(known(self.worker.tier).storage).speed = TierSpeed(believed * PAGE_BYTES)

    def storage_seconds(self, order: StorageOrder) -> float:
        if isinstance(order, Store) or not hasattr(order, "pages"):
            return 0.0
        return len(order.pages) / self.pages_a_second

    def play_once(self) -> list[float]:
        """Seconds to each first token, each prompt asked for once."""
        took = []
        for prompt in PROMPTS:
            begun, request = self.clock, self.submit(prompt, 2)
            self.run_until(self.clock + 20)
            assert request.output == expected(request)
            took.append(self.emitted_at[request][0] - begun)
        self.assert_at_baseline()
        return took


@pytest.fixture(scope="module")
def filled() -> SharedPages:
    shared: SharedPages = {}
    worker = Stored(shared)
    worker.play()
    assert len(shared) >= 39 * len(set(map(tuple, PROMPTS)))
    return shared


def without_storage() -> list[float]:
    return Stored({}).play_once()


def test_first_tokens_come_earlier_from_fast_storage(filled: SharedPages) -> None:
    without, fast = without_storage(), Stored(dict(filled)).play_once()
    # What the first prompt costs is learnt from it.
    assert sum(fast) < 0.4 * sum(without)


def test_slow_storage_is_not_asked(filled: SharedPages) -> None:
    slow = Stored(dict(filled), believed=20, real=20)
    took = slow.play_once()
    assert max(took[1:]) < 1.1 * max(without_storage())
    assert known(known(slow.worker.tier).storage).counts.slow_loads


def test_nobody_waits_longer_for_storage_than_computing_takes(filled: SharedPages) -> None:
    """It was fast when it was measured. What comes too late teaches how slow it is."""
    late = Stored(dict(filled), believed=1000, real=20)
    took, without = late.play_once(), without_storage()
    # A request gives up when it could have computed the same: then it computes.
    assert max(took[1:]) < 2 * max(without) + 0.05
    assert known(known(late.worker.tier).storage).counts.late_loads


def test_nobody_waits_for_storage_that_does_not_answer(filled: SharedPages) -> None:
    silent = Stored(dict(filled))
    silent.storage_seconds = lambda order: 5.0 if isinstance(order, LookUp) else 0.0  # type: ignore[method-assign]
    took, without = silent.play_once(), without_storage()
    assert max(took[1:]) < max(without) + 0.06


def test_what_the_device_has_is_not_waited_for(filled: SharedPages) -> None:
    """Though the host has lost it, and storage would bring it slowly."""
    took, empty = [], SharedPages()
    for shared in (empty, dict(filled)):
        worker = Stored(shared, believed=400, real=20)
        worker.play_once()
        tier = known(worker.worker.tier)
        last = PROMPTS[-1]
        for page in list(tier.pages):
            tier.pages.forget(page.key)
        known(tier.storage).speed = TierSpeed(400 * PAGE_BYTES)  # it has learnt better
        request, begun = worker.submit(last, 2), worker.clock
        worker.run_until(worker.clock + 20)
        assert request.output == expected(request)
        took.append(worker.emitted_at[request][0] - begun)
    assert took[1] == pytest.approx(took[0])


def test_waiting_for_memory_is_no_wait_for_storage() -> None:
    """Who was asked about before there was memory still gets what the host has."""
    worker = Stored({})
    worker.play_once()
    worker.storage_seconds = lambda order: 0.001  # type: ignore[method-assign]
    tier, long, again = known(worker.worker.tier), PROMPTS[-1][:-1], [*PROMPTS[0][:480], *[1] * 80]
    running = worker.submit([*long, 1], 100)
    worker.run_until(worker.clock + 0.3)
    assert running.output, "it has the memory"
    waiting, before = worker.submit(again, 2), tier.counts.loaded_pages
    worker.run_until(worker.clock + 20)
    assert worker.emitted_at[waiting][0] > worker.ended_at[running]
    assert waiting.output == expected(waiting)
    assert tier.counts.loaded_pages - before == 480 // 16
    worker.assert_at_baseline()


def test_storage_is_asked_though_the_hashes_were_made_for_others(
    filled: SharedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lets decode workers read the host makes them, too, of a request that waits."""

    def hash_alone(loads: TierLoads[Any], request: Request, known_tokens: int) -> None:
        known_ids = request.input_ids[:known_tokens]
        loads.keys_of(request, known_ids)

    monkeypatch.setattr(TierLoads, "prefetch", hash_alone)
    worker = Stored(dict(filled))
    worker.play_once()
    assert known(known(worker.worker.tier).storage).counts.loaded_pages


def test_nothing_more_is_brought_for_who_has_left(filled: SharedPages) -> None:
    """One order is on its way when the request is cancelled."""
    worker = Stored(dict(filled), real=20)
    storage = known(known(worker.worker.tier).storage)
    request = worker.submit(PROMPTS[0], 2)
    while not any(isinstance(order, Fetch) for order in known(worker.worker.storage).orders):
        assert worker.step()
    worker.cancel(request, worker.worker)
    worker.run_until(worker.clock + 20)
    assert storage.counts.loaded_pages == storage._most_pages < 39
    worker.assert_at_baseline()
