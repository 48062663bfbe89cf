"""What the device evicts, or a retracted request leaves, comes back from the host with its tokens.

The model counts: a page that comes back with other bytes changes the tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvrelay.engine.config import Speculation
from kvrelay.mem_cache.host.tier_copies import PageMoves
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import Simulation, SimWorker, count
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.simulation.model import Windows
from tests.engine.simulation.placed import ttfts
from tests.engine.simulation.worker import PAGE_BYTES
from tests.engine.test_modes import expected, run_load
from tests.engine.test_scenarios import step_until
from tests.engine.test_token_equality import Mode, assert_same, plain_run, requests_of, serve
from tests.known import known
from tests.pairwise import few

MODES: Final[dict[str, list[Any]]] = {
    "overlap": [True, False],
    "speculation": [Speculation.NONE, Speculation.NGRAM],
    "retract_every": [0, 3],
    "aggregated": [True, False],
}


def every_mode(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that takes all of `MODES`."""
    for name, values in MODES.items():
        test = pytest.mark.parametrize(name, values)(test)
    return test


def in_little_memory(
    page_size: int, *, host_pages: int = 400, chunk: int = 16, **mode: Any
) -> Simulation:
    """The device holds two or three of the requests at a time, and hardly anything besides."""
    return Simulation(
        page_size,
        page_size,
        pages=120 // page_size,
        rows=6,
        chunk=chunk,
        growth_min=0.0,
        growth_max=0.3,
        host_pages=host_pages,
        **mode,
    )


def tier_counts(simulation: Simulation, name: str) -> int:
    return sum(getattr(w.tier.counts, name) for w in simulation.workers if w.tier is not None)


def computed_tokens(simulation: Simulation) -> float:
    return sum(count(worker, "computed_tokens") for worker in simulation.workers)


def evict_all(worker: SimWorker) -> None:
    """A worker's prefix index keeps nothing that nobody uses."""
    for pool, counts in enumerate(worker.kv_cache.audit.page_counts()):
        share = (("all the room", counts.free + counts.cached_evictable),)
        pages = worker.kv_cache.allocator.allocate(pool, share)
        worker.kv_cache.allocator.free(pool, share, pages)


def ask(simulation: Simulation, prompts: list[list[int]], max_tokens: int) -> None:
    """One after the other; each must be right."""
    for prompt in prompts:
        request = simulation.submit(prompt, max_tokens)
        simulation.run()
        assert request.output == expected(request)


@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_evicted_comes_back(page_size: int, aggregated: bool) -> None:
    simulation = in_little_memory(page_size, aggregated=aggregated, workers=1)
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(48)] for _ in range(6)]
    ask(simulation, prompts, 4)
    assert tier_counts(simulation, "written_pages")
    before = computed_tokens(simulation)
    ask(simulation, prompts, 4)
    assert tier_counts(simulation, "loaded_pages") >= 4 * (48 // page_size)
    assert computed_tokens(simulation) - before < before / 2
    simulation.assert_at_baseline()


def test_what_a_retracted_request_leaves_comes_back() -> None:
    """Four outputs that do not fit together: who makes room computes hardly anything twice."""
    simulations = []
    for host_pages in (0, 400):
        simulation = in_little_memory(4, host_pages=host_pages, aggregated=True, workers=1)
        rng = random.Random(2)
        requests = [simulation.submit([rng.randrange(97) for _ in range(20)], 40) for _ in range(4)]
        simulation.run()
        assert all(request.output == expected(request) for request in requests)
        assert count(simulation.workers[0], "retractions")
        simulation.assert_at_baseline()
        simulations.append(simulation)
    without, with_host = map(computed_tokens, simulations)
    assert tier_counts(simulations[1], "loaded_pages")
    assert with_host < without


def test_routers_are_told_what_the_host_has() -> None:
    """A prefix is told once, and stays known when the device has evicted it."""
    simulation = in_little_memory(4, aggregated=True, workers=1, host_pages=400)
    worker, rng = simulation.workers[0], random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(68)] for _ in range(4)]
    ask(simulation, prompts, 1)
    hashes = worker.kv_cache.index.log.hashes  # type: ignore[attr-defined]
    marks = {mark for prompt in prompts for mark in hashes.marks_of(prompt, "")}
    assert marks <= set(worker.kv_cache.index.marks() or ())
    assert sum(worker.kv_cache.count_cached(np.array(p, np.int32)) >= 64 for p in prompts) < 4


def test_a_forward_that_fails_leaves_nothing_on_the_host() -> None:
    simulation = in_little_memory(4, aggregated=True, workers=1)
    worker, prompt = simulation.workers[0], list(range(60))
    simulation.submit(prompt, 4)
    while worker.tier is None or not worker.copies:
        assert simulation.step()
    while worker.copies:
        worker.end_copy()
    while not worker.steps:
        assert simulation.step()
    worker.turn()
    assert list(worker.tier.pages)
    worker.fail_step()
    worker.turn()
    assert not list(worker.tier.pages)
    simulation.run()
    ask(simulation, [prompt], 4)
    assert not tier_counts(simulation, "loaded_pages")
    simulation.assert_at_baseline()


COPY_FAILURES: dict[str, Callable[[PageMoves], bool]] = {
    "to the host": lambda moves: moves.to_host,
    "back": lambda moves: not moves.to_host,
    "every third": lambda moves: moves.operation % 3 == 0,
}


@few(2)
@pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])
@pytest.mark.parametrize("which", COPY_FAILURES)
def test_copies_that_fail_cost_no_token_and_no_page(which: str, aggregated: bool) -> None:
    simulation = in_little_memory(4, aggregated=aggregated, workers=1)
    for worker in simulation.workers:
        worker.copy_fails = COPY_FAILURES[which]
    rng = random.Random(4)
    prompts = [[rng.randrange(97) for _ in range(48)] for _ in range(6)]
    for _ in range(4):
        ask(simulation, prompts, 4)
    counts = {name: tier_counts(simulation, name) for name in ("written_pages", "loaded_pages")}
    assert bool(counts["written_pages"]) is (which != "to the host"), counts
    assert bool(counts["loaded_pages"]) is (which == "every third"), counts
    moved = "write_bytes" if which == "to the host" else "load_bytes"
    assert tier_counts(simulation, moved), "no copy has failed"
    simulation.assert_at_baseline()


@pytest.mark.parametrize("succeed", [0, 10])
@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=["full", "hybrid"])
def test_what_could_not_be_copied_is_not_copied_without_end(windows: Windows, succeed: int) -> None:
    """More pages than one copy has: their rest does not begin again where a copy failed."""
    simulation = in_little_memory(1, chunk=105, aggregated=True, workers=1, windows=windows)
    worker, tries = simulation.workers[0], [0]

    def fail(moves: PageMoves) -> bool:
        tries[0] += moves.to_host
        assert tries[0] < 20, "it is tried without end"
        return moves.to_host and tries[0] > succeed

    worker.copy_fails = fail
    known(worker.tier)._writes._most_pages = 8
    ask(simulation, [list(range(60, 95)) * 3], 4)
    assert tries[0] > succeed, "no copy has failed"
    simulation.assert_at_baseline()


def test_requests_of_one_prefix_wait_for_one_load() -> None:
    simulation = in_little_memory(4, aggregated=True, workers=1)
    rng = random.Random(6)
    prompts = [[rng.randrange(97) for _ in range(48)] for _ in range(6)]
    ask(simulation, prompts, 4)
    assert not tier_counts(simulation, "loaded_pages")
    requests = [simulation.submit([*prompts[0], number], 4) for number in range(2)]
    simulation.run()
    assert all(request.output == expected(request) for request in requests)
    assert tier_counts(simulation, "loaded_pages") == 48 // 4
    simulation.assert_at_baseline()


def test_what_is_evicted_while_a_grant_is_awaited_is_brought_again() -> None:
    """The prefill worker had it when others took the room, before the decode worker had any."""
    simulation = in_little_memory(4, aggregated=False, workers=1)
    worker, rng = simulation.prefills[0], random.Random(7)
    tier, clock = known(worker.tier), [0.0]
    worker.kv_cache.clock = lambda: clock[0]
    prompts = [[rng.randrange(97) for _ in range(48)] for _ in range(2)]
    ask(simulation, prompts, 4)
    evict_all(worker)
    again = simulation.submit(prompts[0], 4)
    loads, live = worker.scheduler._queue._loads, worker.context.requests
    step_until(simulation, lambda: any(loads.wait_of(one).load for one in live.values()))
    [request] = live.values()
    wait = loads.wait_of(request)
    load = known(wait.load).load
    while not load.ended:
        worker.end_copy()
        worker.turn()
    assert request.lease is None, "it was granted first"
    clock[0] = 9.0
    evict_all(worker)
    simulation.run()
    assert again.output == expected(again)
    assert tier.counts.loaded_pages == 2 * (47 // 4)
    assert wait.load_seconds == 0.0, "what came after it was no wait for it"
    simulation.assert_at_baseline()


def test_a_prompt_that_the_host_cannot_hold_does_not_keep_others_out() -> None:
    """What has no room is dropped once, not tried again in each pass."""
    simulation = in_little_memory(1, host_pages=16, aggregated=True, workers=1)
    tier, rng = known(simulation.workers[0].tier), random.Random(5)
    tier._writes._most_pages = 8
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (80, 12)]
    ask(simulation, prompts, 2)
    assert tier.counts.dropped_pages <= sum(map(len, prompts))
    assert not tier._writes._candidates
    ids = np.array(prompts[1], np.int32)
    keys = [tier.hash(ids, "")[:32]]
    assert tier.pages.num_known(keys), "the host has the later one"


@few(2)
@every_mode
@pytest.mark.parametrize("host_pages", [7, 200])
def test_tokens_do_not_depend_on_the_tier(
    overlap: bool, speculation: Speculation, retract_every: int, aggregated: bool, host_pages: int
) -> None:
    for page_size in (1, 4):
        simulation = in_little_memory(
            page_size,
            host_pages=host_pages,
            aggregated=aggregated,
            overlap=overlap,
            speculation=speculation,
            debug_retract_every=retract_every,
            local=0.0 if aggregated else 0.5,
        )
        run_load(simulation, page_size, count=16, choices=3)


real_models = pytest.mark.parametrize(
    ("architecture", "bytes_a_page", "aggregated"),
    [("llama", 3072, True), ("deepseek", 1920, False)],
)


class RealModel:
    """A real model on workers of 64 pages, and what twelve requests generate if undisturbed."""

    def __init__(self, path: Path, architecture: str, bytes_a_page: int, aggregated: bool) -> None:
        make_checkpoint(path, architecture)
        self._path, self._kv_memory = path, 64 * bytes_a_page
        self._asked = requests_of(5, 12, 128, 12)
        self._plain = plain_run(path, "float32", tuple(self._asked))
        self._mode = Mode(page_size=4, aggregated=aggregated, cached=True, retract_every=5)

    def serve(self, **tiers: Any) -> Simulation:
        memory, path = self._kv_memory, self._path
        return serve(path, path, "float32", self._mode, kv_memory=memory, **tiers)

    def ask(self, simulation: Simulation) -> None:
        served = [one.submit(simulation) for one in self._asked]
        simulation.run()
        for requests, undisturbed in zip(served, self._plain, strict=True):
            for request, other in zip(requests, undisturbed, strict=True):
                assert_same(request, other)
        simulation.assert_at_baseline()


@real_models
def test_a_real_model_gives_the_same_tokens(
    tmp_path: Path, architecture: str, bytes_a_page: int, aggregated: bool
) -> None:
    """In float32, after eviction and return, and after retraction and return."""
    model = RealModel(tmp_path, architecture, bytes_a_page, aggregated)
    simulation = model.serve(host_kv_memory=4 << 20)
    for _ in range(2):
        model.ask(simulation)
    assert tier_counts(simulation, "loaded_pages")


# Never slower: under a virtual clock


PROMPTS = [[random.Random(seed).randrange(97) for _ in range(640)] for seed in range(6)]


class Clocked(Clockwork):
    """An aggregated worker that holds one prompt; a forward takes 10 ms and 0.2 ms a token.

    Args:
        believed: pages a second of the host, as measured at the start.
        real: as copies take.
    """

    def __init__(
        self, host_pages: int, believed: float = math.inf, real: float = math.inf, **options: Any
    ) -> None:
        super().__init__(
            1, 16, 64, 4, 64, aggregated=True, workers=1, host_pages=host_pages, **options
        )
        self.worker, self.real = self.workers[0], real
        self.worker.kv_cache.clock = self.now
        if self.worker.tier is not None:
            self.worker.tier.loads.speed = TierSpeed(believed * PAGE_BYTES)

    def copy_seconds(self, worker: SimWorker, moves: PageMoves) -> float:
        return 0.0 if moves.to_host else moves.num_pages / self.real

    def play(self) -> list[float]:
        """Seconds to each first token, all prompts three times, one after the other."""
        for prompt in PROMPTS * 3:
            request = self.submit(prompt, 2)
            self.run_until(self.clock + 20)
            assert request.output == expected(request)
        self.assert_at_baseline()
        return list(ttfts(self))


def test_first_tokens_come_earlier_from_a_fast_host() -> None:
    without, fast = Clocked(0).play(), Clocked(400).play()
    assert sum(fast[6:]) < 0.3 * sum(without[6:])
    assert fast[:6] == without[:6]


def test_what_is_evicted_while_its_request_waits_for_memory_is_brought_again() -> None:
    """While it comes a later request takes the room for the rest, and another one what came."""
    worker, rng = Clocked(400, believed=400, real=400), random.Random(9)
    worker.play()
    tier = known(worker.worker.tier)
    request = worker.submit(PROMPTS[0], 2)
    worker.run_until(worker.clock + 0.01)
    assert tier.loads._running, "it is on its way"
    others = [worker.submit(rng.choices(range(97), k=370), 14)]
    worker.run_until(worker.clock + 0.12)
    assert not tier.loads._running
    before = tier.counts.loaded_pages
    others.append(worker.submit(rng.choices(range(97), k=320), 2))
    worker.run_until(worker.clock + 20)
    assert worker.emitted_at[request][0] > worker.ended_at[others[0]], "it had room at once"
    assert all(one.output == expected(one) for one in [request, *others])
    assert tier.counts.loaded_pages > before
    assert request.cached_tokens == 39 * 16
    worker.assert_at_baseline()


def test_a_slow_host_is_not_asked() -> None:
    """Of 39 pages at 20 a second: two seconds, where computing takes a quarter of one."""
    slow = Clocked(400, believed=20, real=20)
    without = Clocked(0).play()
    assert slow.play() == pytest.approx(without)
    tier = known(slow.worker.tier)
    assert (tier.counts.loaded_pages, tier.counts.late_loads) == (0, 0)
    assert tier.counts.slow_loads


def test_nobody_waits_longer_for_a_host_than_computing_takes() -> None:
    """It was fast when it was measured. What comes too late teaches how slow it is."""
    late = Clocked(400, believed=1000, real=20)
    without = Clocked(0).play()
    took = late.play()
    # A copy that runs has to end: four pages.
    assert max(took) < 2 * max(without) + 4 / 20
    tier = known(late.worker.tier)
    assert 0 < tier.counts.late_loads < 12
    assert tier.counts.slow_loads
