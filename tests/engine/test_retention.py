"""A request whose pages are to be retained is found again after others have filled the memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.engine.scheduler.commands import Submit
from tests.engine.conversations import computed_tokens
from tests.engine.session_cluster import finish
from tests.engine.simulation import Simulation, SimWorker, reference
from tests.engine.test_scenarios import one_pair

PROMPT = random.Random(8).choices(range(97), k=40)


def say(simulation: Simulation, prompt: list[int], seconds: float = 0.0) -> None:
    """One request, alone, to its end."""
    pair = simulation.prefills[0], simulation.decodes[0]
    send = simulation.send

    def retaining(worker: SimWorker, command: Submit) -> None:
        submission = replace(command.submission, retain_seconds=seconds)
        send(worker, replace(command, submission=submission))

    simulation.send = retaining  # type: ignore[method-assign]
    request = simulation.submit(prompt, 6, place=pair)
    simulation.run()
    simulation.send = send  # type: ignore[method-assign]
    assert request.output == reference(prompt, 6)


@pytest.mark.parametrize(("seconds", "computed"), [(0.0, 40), (3600.0, 4)])
def test_a_prompt_outlives_others_while_it_is_retained(seconds: float, computed: int) -> None:
    simulation = one_pair(3, pages=40)
    prefill, decode = simulation.prefills[0], simulation.decodes[0]
    say(simulation, PROMPT, seconds)
    retained = [worker.kv_cache.index.retained_tokens() for worker in (prefill, decode)]
    assert retained == ([40, 44] if seconds else [0, 0])
    for number in range(6):
        say(simulation, [number, *random.Random(number).choices(range(97), k=60)])
    assert decode.kv_cache.cache_counts.evicted_pages
    before = computed_tokens(prefill)
    say(simulation, PROMPT, seconds)
    assert computed_tokens(prefill) - before == computed
    finish(simulation)
