"""Steps by graphs on a device that runs all work late: what it reads is not overwritten before."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from kvrelay.device.device_streams import DeviceEvent, PinnedSet, Staging, StagingSet
from kvrelay.model_runner import runner as runner_module
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphSizes
from kvrelay.model_runner.graphs.graph_step import GraphStep
from kvrelay.model_runner.runner import ModelRunner
from tests.late_device import LateStreams
from tests.late_operations import LateOperations
from tests.model_runner import graph_double
from tests.model_runner.graph_double import Recording
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import Models

Steps = Sequence[Mapping[int, int]]
"""The new tokens of the sequences of each step."""
STEPS: Steps = [
    dict.fromkeys(step, 1)
    for step in ([0, 1], [0, 1], [1], [0, 1, 2], [0, 1, 2], [2], [0, 1], [0, 1])
]
DRAFTED: Steps = [{0: 3, 1: 1}, {0: 1, 1: 3}, {1: 1}, {0: 2, 1: 2, 2: 3}, {2: 1}, {0: 3, 1: 1}]
PROMPTS = {0: 8, 1: 5, 2: 4}


class InjectedError(Exception):
    """A step fails by it, and is launched again."""


class PlainEvent:
    """An event, whose wait runs what was launched as it is."""

    def __init__(self, event: DeviceEvent) -> None:
        self._event = event

    def passed(self) -> bool:
        return self._event.passed()

    def wait(self) -> None:
        with _disable_current_modes():
            self._event.wait()


class PlainStaging:
    """Staging that the host spoils at once, not by work on a stream."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def begin(self) -> StagingSet:
        with _disable_current_modes():
            return self._staging.begin()


class LateGraph:
    """A graph whose launch is a piece of work of the forward's stream."""

    def __init__(self, recording: Recording, device: LateStreams) -> None:
        self._recording, self._device = recording, device

    def replay(self) -> None:
        self._device.forward.launch(self._recording.replay)


@torch.inference_mode()
def run(
    models: Models,
    name: str,
    tokens: list[int],
    patch: pytest.MonkeyPatch,
    device: LateStreams,
    steps: Steps,
) -> list[torch.Tensor]:
    """The logits of each step; nobody waits for a step before the next one is launched."""
    patch.setattr(runner_module, "make_staging", lambda _: PlainStaging(device.make_staging()))

    def record(_: torch.device) -> DeviceEvent:
        return PlainEvent(device.forward.record())

    def capture() -> Callable[[Callable[[], object]], LateGraph]:
        return lambda work: LateGraph(graph_double.capture(work), device)

    patch.setattr(runner_module, "record_event", record)
    runner = ModelRunner(
        models.folder(name),
        "float32",
        "cpu",
        attention=AttentionChoice.FLASHINFER,
        graphs=GraphOptions(GraphSizes((2, 4)), page_size=3, most_each=3),
        capture=capture,
    )
    running = Sequences(runner, 3, 40)
    runner.warm_up()
    runner.capture_graphs()
    running.forward({i: tokens[:count] for i, count in PROMPTS.items()})
    batches, results = [], []
    for step in steps:
        places = {i: running.seq_lens[i] for i in step}
        batches.append(running.batch({i: tokens[p : p + step[i]] for i, p in places.items()}))
        with LateOperations(device.forward):
            try:
                results.append(runner.launch(batches[-1]))
            except InjectedError:
                results.append(runner.launch(batches[-1]))
    device.forward.record().wait()
    return results


def check(
    models: Models,
    name: str,
    tokens: list[int],
    patch: pytest.MonkeyPatch,
    seed: int,
    steps: Steps = STEPS,
) -> None:
    """The logits of all steps are those of transformers, though the host had to wait."""
    device = LateStreams(random.Random(seed))
    got = run(models, name, tokens, patch, device, steps)
    lengths, reference = dict(PROMPTS), models.logits(name, tokens[:40])
    for step, logits in zip(steps, got, strict=True):
        rows = [reference[lengths[i] : lengths[i] + count] for i, count in step.items()]
        torch.testing.assert_close(logits, torch.cat(rows), rtol=1e-4, atol=1e-4)
        for i, count in step.items():
            lengths[i] += count
    assert device.waits


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("steps", [STEPS, DRAFTED], ids=["decode", "drafts"])
@pytest.mark.parametrize("seed", range(2))
def test_steps_that_nobody_waits_for(
    seed: int,
    steps: Steps,
    name: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_double(monkeypatch)
    check(models, name, tokens, monkeypatch, seed, steps)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_failed_step_has_launched_is_waited_for(
    seed: int, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan is made at the second try; by then changes of page tables are on their way."""
    use_double(monkeypatch)
    replan, numbers = FlashInferAttention.replan_decode, itertools.count()

    def fail_first(self: Any, *arguments: Any) -> None:
        if next(numbers) % 2 == 0:
            raise InjectedError
        replan(self, *arguments)

    monkeypatch.setattr(FlashInferAttention, "replan_decode", fail_first)
    check(models, "llama", tokens, monkeypatch, seed)
    assert next(numbers) > 2


def staging_is_free_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedSet, "use_until", lambda *_: None)


def plans_are_made_at_once(patch: pytest.MonkeyPatch) -> None:
    place = GraphStep.place

    def hasty(self: Any, layout: Any, changes: Any, _: Any) -> None:
        place(self, layout, changes, lambda: None)

    patch.setattr(GraphStep, "place", hasty)


@pytest.mark.parametrize(
    ("plant", "steps"),
    [
        (staging_is_free_at_once, STEPS),
        (plans_are_made_at_once, STEPS),
        (plans_are_made_at_once, DRAFTED),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    steps: Steps,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_double(monkeypatch)
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check(models, "llama", tokens, monkeypatch, 0, steps)
