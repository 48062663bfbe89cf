"""Faults in the order of a device's work: random walks over the late device find each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.device.device_streams import PASSED, PinnedStaging
from kvrelay.engine.executor import model_executor
from kvrelay.engine.executor.model_executor import LaunchedForward, ModelExecutor
from kvrelay.engine.executor.step_batch import LogitRows
from kvrelay.mem_cache.fence import StepFence
from kvrelay.model_runner.sampling.step_sampling import DeviceSampling
from kvrelay.model_runner.sampling.token_counts import TokenCounts
from tests.engine.simulation import Simulation
from tests.engine.test_host_tier import in_little_memory as with_host_tier
from tests.engine.test_modes import expected, in_little_memory, run_load
from tests.late_device import LateStream
from tests.pairwise import few

SEEDS = 12
Plant = Callable[[pytest.MonkeyPatch], None]


def announce_before_the_event(patch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt counts as written when it is launched: nothing of it is to be read."""
    launch = ModelExecutor.launch

    def early(self: Any, step: Any) -> Any:
        launched = launch(self, step)
        if not any(item.sample for item in step.scheduled):
            launched.home = PASSED
        return launched

    patch.setattr(ModelExecutor, "launch", early)


def reclaim_at_launch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepFence, "passed", lambda self: self.clock.launched >= self.step)


def use_staging_too_early(patch: pytest.MonkeyPatch) -> None:
    """There is one set, and nobody waits for its last use."""
    begin = PinnedStaging.begin

    def early(self: Any) -> Any:
        self._next = 0
        self._sets[0].use_until(PASSED)
        return begin(self)

    patch.setattr(PinnedStaging, "begin", early)


def bring_results_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateStream, "wait_for", lambda self, event: None)


def take_another_rows_token(patch: pytest.MonkeyPatch) -> None:
    """The next step's inputs are gathered from the wrong places."""
    add = LogitRows.add

    def wrong(self: Any, *args: Any) -> None:
        add(self, *args)
        self.first_sampled[-1] = 0

    patch.setattr(LogitRows, "add", wrong)


def begin_with_what_the_host_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_executor, "find_awaited", lambda *_: None)


def edit_logits_without_the_latest_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelExecutor, "must_wait", lambda self, step: False)


def count_tokens_behind_the_draw(patch: pytest.MonkeyPatch) -> None:
    """Penalties do not know the token that the step before has sampled."""

    def wrong(self: Any) -> None:
        counted, self.counted = self.counted, None
        sample(self)
        if counted is not None:
            counted.count()

    sample = LaunchedForward.sample
    patch.setattr(LaunchedForward, "sample", wrong)


def count_beside_the_forward(patch: pytest.MonkeyPatch) -> None:
    """On another stream: before there is a token to count, or behind the draw."""
    launch_forward = ModelExecutor._launch_forward

    def beside(self: Any, launched: Any) -> None:
        launch_forward(self, launched)
        counted, launched.counted = launched.counted, None
        if counted is not None:
            self._streams.copies.launch(counted.count)

    patch.setattr(ModelExecutor, "_launch_forward", beside)


def give_a_row_as_it_is(patch: pytest.MonkeyPatch) -> None:
    """Another request's tokens count, too."""
    change = TokenCounts.change

    def wrong(self: Any, changes: Any, sampled: Any) -> None:
        change(self, replace(changes, cleared=changes.cleared[:0]), sampled)

    patch.setattr(TokenCounts, "change", wrong)


def tell_a_copys_end_before_it_has_run(patch: pytest.MonkeyPatch) -> None:
    """Of pages between the device and the host."""
    patch.setattr(Simulation, "_copy_is_home", lambda self, worker: True)


def free_what_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    """The device's ids are dropped when their copy to the host has been launched."""
    send_home = DeviceSampling.send_home

    def drop(self: Any, bring: Any) -> None:
        send_home(self, bring)
        self._draws = None

    patch.setattr(DeviceSampling, "send_home", drop)


def copy_pages_beside_the_forward(patch: pytest.MonkeyPatch) -> None:
    """The pages that choices do not share are copied on another stream."""

    def beside(self: Any, copies: Any) -> None:
        self._streams.copies.launch(lambda: self._copy(copies))

    patch.setattr(ModelExecutor, "copy", beside)


WRONG_TOKENS = "SimRequest|wrong tokens"


@few(3)
@pytest.mark.parametrize(("plant", "found"), [
    (announce_before_the_event, WRONG_TOKENS),
    (reclaim_at_launch, WRONG_TOKENS),
    (use_staging_too_early, "no tokens|out of bounds|SimRequest"),
    (bring_results_before_they_are_there, "nothing is on its way"),
    (take_another_rows_token, WRONG_TOKENS),
    (begin_with_what_the_host_knows, "no tokens"),
    (edit_logits_without_the_latest_token, WRONG_TOKENS),
    (count_tokens_behind_the_draw, WRONG_TOKENS),
    (count_beside_the_forward, f"nothing was sampled|{WRONG_TOKENS}"),
    (give_a_row_as_it_is, WRONG_TOKENS),
    (tell_a_copys_end_before_it_has_run, WRONG_TOKENS),
    (free_what_is_on_its_way, "what is copied was freed"),
    (copy_pages_beside_the_forward, WRONG_TOKENS),
], ids=lambda one: getattr(one, "__name__", ""))  # fmt: skip
def test_a_planted_fault_is_found(
    plant: Plant, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "late", True)
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError), match=found):
        walk_often()


def walk_often() -> None:
    for seed in range(SEEDS):
        walk(seed)


def walk(seed: int) -> None:
    for aggregated in (False, True):
        simulation = in_little_memory(1 + 3 * (seed % 2), aggregated=aggregated)
        simulation.random.seed(seed)
        run_load(simulation, seed, count=16, choices=3)
    end_early(seed)
    bring_pages_back(seed)


def end_early(seed: int) -> None:
    """Outputs that end while the next step runs for them; their memory is used again at once."""
    simulation, rng = in_little_memory(1 + 3 * (seed % 2), cached=False), random.Random(seed)
    simulation.random.seed(seed)
    # Reads of new requests end before the device comes to its work.
    simulation.slow_forwards = True
    stops = frozenset(range(0, 97, 4))
    for _ in range(24):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 30))]
        simulation.submit(prompt, 16, stop_token_ids=stops)
    simulation.run()
    for request in simulation.submitted:
        plain = expected(request)
        last = next((at for at, token in enumerate(plain) if token in stops), len(plain))
        assert request.output == plain[: last + 1], "wrong tokens"
    simulation.assert_at_baseline()


def bring_pages_back(seed: int) -> None:
    """Prompts that begin alike, in memory that does not hold them, with a host below it."""
    simulation, rng = with_host_tier(4, aggregated=True, workers=1), random.Random(seed)
    heads = [[rng.randrange(97) for _ in range(32)] for _ in range(4)]
    for _ in range(20):
        tail = [rng.randrange(97) for _ in range(rng.randint(1, 8))]
        simulation.submit(rng.choice(heads) + tail, rng.randint(1, 8))
        for _ in range(rng.randint(0, 120)):
            simulation.step()
    simulation.run()
    for request in simulation.submitted:
        assert request.output == expected(request), "wrong tokens"
    simulation.assert_at_baseline()


def test_walks_find_nothing_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "late", True)
    for seed in range(2):
        walk(seed)
