"""Models with sliding windows above a host tier: a prefix comes back with its windows, or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.config import Speculation
from tests.checkpoints import make_checkpoint
from tests.engine.conversations import Conversation, talk
from tests.engine.session_cluster import cluster, finish
from tests.engine.simulation import Simulation, count
from tests.engine.simulation.model import Windows
from tests.engine.test_host_tier import (
    COPY_FAILURES,
    ask,
    computed_tokens,
    every_mode,
    evict_all,
    in_little_memory,
    tier_counts,
)
from tests.engine.test_modes import run_load
from tests.engine.test_token_equality import Mode, assert_same, plain_run, requests_of, serve
from tests.known import known
from tests.pairwise import few

WINDOWS = pytest.mark.parametrize("windows", [(None, 7), (7,)], ids=["hybrid", "window"])
ROLES = pytest.mark.parametrize("aggregated", [True, False], ids=["aggregated", "pair"])


def prompts_of(seed: int, number: int = 6, length: int = 48) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for _ in range(number)]


def push_out(simulation: Simulation) -> None:
    """The device's prefix indexes keep nothing that nobody uses."""
    for worker in simulation.workers:
        evict_all(worker)


@few(1)
@WINDOWS
@ROLES
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_evicted_comes_back(page_size: int, aggregated: bool, windows: Windows) -> None:
    simulation = in_little_memory(
        page_size, host_pages=800, aggregated=aggregated, workers=1, windows=windows
    )
    prompts = prompts_of(1, 4)
    ask(simulation, prompts, 4)
    before = computed_tokens(simulation)
    push_out(simulation)
    ask(simulation, prompts, 4)
    assert tier_counts(simulation, "loaded_pages") >= 2 * (48 // page_size)
    assert computed_tokens(simulation) - before < before / 2
    simulation.assert_at_baseline()


def test_a_prefix_that_many_share_comes_back_where_they_part() -> None:
    """Its window is in the middle of the first prompt, which has passed it."""
    simulation = in_little_memory(4, aggregated=True, workers=1, windows=(None, 7))
    shared, ends = prompts_of(3, 1, 40)[0], prompts_of(4, 5, 20)
    for end in ends:
        before = computed_tokens(simulation)
        ask(simulation, [[*shared, *end]], 4)
        push_out(simulation)
    assert computed_tokens(simulation) - before < 40
    simulation.assert_at_baseline()


@pytest.mark.parametrize("most_pages", [1000, 1], ids=["small pages", "large pages"])
def test_a_window_that_the_host_has_lost_is_copied_again(most_pages: int) -> None:
    """The page is there. When the device has its window again, so has the host: as a whole."""
    simulation = in_little_memory(4, aggregated=True, workers=1, windows=(None, 7))
    prompt, tier = prompts_of(5, 1)[0], known(simulation.workers[0].tier)
    ask(simulation, [prompt], 4)
    for page in tier.pages:
        for pool, part in list(page.parts.items()):
            tier.pages.windows[pool].drop(part)
    tier._writes._most_pages = most_pages
    for loads in (False, True):
        push_out(simulation)
        before = computed_tokens(simulation)
        ask(simulation, [prompt], 4)
        assert (computed_tokens(simulation) - before < 20) is loads
    simulation.assert_at_baseline()


@few(3)
@WINDOWS
@ROLES
@pytest.mark.parametrize("which", COPY_FAILURES)
def test_copies_that_fail_cost_no_token_and_no_page(
    which: str, aggregated: bool, windows: Windows
) -> None:
    simulation = in_little_memory(4, aggregated=aggregated, workers=1, windows=windows)
    for worker in simulation.workers:
        worker.copy_fails = COPY_FAILURES[which]
    prompts = prompts_of(4, 3)
    for _ in range(4):
        ask(simulation, prompts, 4)
        push_out(simulation)
    assert bool(tier_counts(simulation, "written_pages")) is (which != "to the host")
    if which == "back":
        assert not tier_counts(simulation, "loaded_pages")
    simulation.assert_at_baseline()


@few(1)
@every_mode
@pytest.mark.parametrize("host_pages", [7, 200])
@WINDOWS
def test_tokens_do_not_depend_on_the_tier(
    overlap: bool,
    speculation: Speculation,
    retract_every: int,
    aggregated: bool,
    host_pages: int,
    windows: Windows,
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
            windows=windows,
        )
        run_load(simulation, page_size, count=16, choices=3)


REAL: list[Any] = [
    ("gemma3", 6144, True),
    pytest.param("gemma3", 6144, False, marks=pytest.mark.slow),
    ("mistral-window", 3072, True),
    pytest.param("qwen3-window", 6144, False, marks=pytest.mark.slow),
]


@few(1)
@pytest.mark.parametrize(("architecture", "bytes_a_page", "aggregated"), REAL)
def test_a_real_model_gives_the_same_tokens(
    tmp_path: Path, architecture: str, bytes_a_page: int, aggregated: bool
) -> None:
    """In float32, after eviction and return, and after retraction and return."""
    make_checkpoint(tmp_path, architecture)
    asked = requests_of(5, 12, 128, 12)
    plain = plain_run(tmp_path, "float32", tuple(asked))
    mode = Mode(page_size=4, aggregated=aggregated, cached=True, retract_every=5)
    simulation = serve(
        tmp_path, tmp_path, "float32", mode, kv_memory=64 * bytes_a_page, host_kv_memory=4 << 20
    )
    for _ in range(3):
        served = [one.submit(simulation) for one in asked]
        simulation.run()
        for requests, undisturbed in zip(served, plain, strict=True):
            for request, other in zip(requests, undisturbed, strict=True):
                assert_same(request, other)
        push_out(simulation)
    assert tier_counts(simulation, "loaded_pages")
    simulation.assert_at_baseline()


def test_an_idle_session_comes_back_from_the_host() -> None:
    simulation = cluster(
        "aggregated", pages=60, rows=4, host_pages=400, growth_min=0.0, windows=(None, 7)
    )
    worker, rng = simulation.decodes[0], random.Random(1)
    sessions = [Conversation(simulation, str(name)) for name in range(5)]
    for session in sessions:
        talk(session, rng.choices(range(97), k=36), 5)
    assert count(worker, "retractions") == 0
    push_out(simulation)
    before = computed_tokens(simulation)
    loaded = tier_counts(simulation, "loaded_pages")
    talk(sessions[0], rng.choices(range(97), k=6), 5)
    assert tier_counts(simulation, "loaded_pages") > loaded
    assert computed_tokens(simulation) - before < 36
    finish(simulation, *sessions)
