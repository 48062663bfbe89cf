"""What workers record of a traced attempt, whatever becomes of it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.engine.scheduler.attempt_trace import (
    ASK,
    CHUNK,
    DECODE,
    GRANT,
    HANDED_OVER,
    PULL,
    QUEUE,
    TAKEN_OVER,
    begin_trace,
)
from kvrelay.engine.scheduler.commands import Submit
from kvrelay.observe.spans import Span
from kvrelay.observe.trace_context import TraceContext, new_span_id, new_trace_id
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation import Simulation
from tests.engine.simulation.worker import SimWorker
from tests.engine.test_scenarios import random_prompts, step_until

KEY = RequestKey("router", "r", 1)


class Traced(Simulation):
    """A cluster all of whose attempts are traced."""

    def __init__(self, seed: int, **options: Any) -> None:
        sizes = {"page_size": 4, "pages": 60, "rows": 4, "chunk": 16, "workers": 1}
        super().__init__(seed, **{**sizes, **options})
        self.spans: list[Span] = []
        self.contexts: dict[tuple[str, RequestKey], TraceContext] = {}

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def send(self, worker: SimWorker, command: Submit) -> None:
        context = TraceContext(new_trace_id(), new_span_id(), sampled=True)
        self.contexts[worker.name, command.key] = context
        trace = begin_trace(self, str(context), worker.role_name, command.key)
        assert trace is not None
        super().send(worker, replace(command, trace=trace))

    def own_spans(self) -> dict[bytes, list[Span]]:
        """The spans that are directly below an attempt, by its trace."""
        attempts = {context.span_id for context in self.contexts.values()}
        found: dict[bytes, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.parent_id in attempts:
                found[span.context.trace_id].append(span)
        return found

    def of(self, worker: str) -> list[Span]:
        """The spans of a worker that has had one attempt."""
        [trace] = [one.trace_id for (name, _), one in self.contexts.items() if name == worker]
        return [span for span in self.spans if span.context.trace_id == trace]

    def assert_whole(self) -> None:
        """Each attempt has one span on each of its workers, and all others of it are below."""
        owns = self.own_spans()
        for context in self.contexts.values():
            (own,) = owns[context.trace_id]
            assert own.parent_id == context.span_id
            rest = [s for s in self.spans if s.context.trace_id == context.trace_id and s != own]
            assert all(span.parent_id == own.context.span_id for span in rest)
            assert all(
                own.start_ns <= span.start_ns <= span.end_ns <= own.end_ns
                for span in rest
                if span.name not in (PULL, CHUNK)  # simulated ones have no clock
            )


def test_a_hand_over() -> None:
    simulation = Traced(1)
    simulation.submit(list(range(40)), 6)
    simulation.run()
    simulation.assert_whole()
    prefill, decode = simulation.of("p0"), simulation.of("d0")
    assert Counter(span.name for span in prefill) == {
        "prefill worker": 1,
        QUEUE: 1,
        ASK.name: 1,
        CHUNK: 3,
        HANDED_OVER.name: 1,
    }
    (ask,) = [span for span in prefill if span.name == ASK.name]
    (announced,) = [span for span in prefill if span.name == HANDED_OVER.name]
    assert ask.end_ns <= announced.start_ns
    chunks = [span.attributes for span in prefill if span.name == CHUNK]
    assert [one["kvrelay.tokens"] for one in chunks] == [16, 16, 8]
    assert [one["kvrelay.context_tokens"] for one in chunks] == [0, 16, 32]
    names = Counter(span.name for span in decode)
    pulls = names.pop(PULL)
    assert names == {
        "decode worker": 1,
        QUEUE: 1,
        GRANT.name: 1,
        TAKEN_OVER.name: 1,
        DECODE.name: 1,
    }
    pages = sum(s.attributes["kvrelay.pages"] for s in decode if s.name == PULL)  # type: ignore[misc]
    assert pages == 10
    assert 1 <= pulls <= 3
    (own,) = [span for span in decode if span.name == "decode worker"]
    assert own.attributes["kvrelay.output_tokens"] == 6
    assert own.attributes["kvrelay.outcome"] == "finished"
    assert not [span for span in simulation.spans if span.error is not None]


@pytest.mark.parametrize("aggregated", [False, True])
def test_choices_are_one_attempt(aggregated: bool) -> None:
    simulation = Traced(2, aggregated=aggregated, rows=8)
    simulation.submit_choices(3, list(range(20)), 6)
    simulation.run()
    simulation.assert_whole()
    (own,) = [s for s in simulation.of("a0" if aggregated else "d0") if " worker" in s.name]
    assert own.attributes["kvrelay.output_tokens"] == 18
    assert sum(span.name == DECODE.name for span in simulation.spans) == 1


def test_a_failed_read_is_an_error() -> None:
    simulation = Traced(3)
    request = simulation.submit(list(range(40)), 6)
    step_until(simulation, lambda: bool(request.decode.agent.ordered))
    simulation.fail_read()
    step_until(simulation, lambda: not request.decode.context.requests)
    simulation.settle_deaths()
    simulation.run()
    failed = {span.name for span in simulation.of("d0") if span.error is not None}
    assert {PULL, TAKEN_OVER.name, "decode worker"} == failed
    errors = [span.error for span in simulation.of("d0") if span.name == "decode worker"]
    assert "injected" in str(errors)


@pytest.mark.parametrize("aggregated", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_attempt_ends_once_whatever_happens(seed: int, aggregated: bool) -> None:
    """Aborted, retracted, broken off, of several choices: none is lost, and none counted twice."""
    simulation = Traced(
        seed, aggregated=aggregated, pages=18, growth_min=0.0, growth_max=0.0, rows=8
    )
    rng = random.Random(seed)
    requests = [
        simulation.submit_choices(1 + number % 2, prompt, 16)[0]
        for number, prompt in enumerate(random_prompts(seed, 6, 20))
    ]
    for _ in range(3):
        for _ in range(rng.randrange(60)):
            simulation.step()
        one = rng.choice(requests)
        simulation.cancel(one, one.decode)
        if not aggregated:
            simulation.break_stream()
    simulation.run()
    owns = simulation.own_spans()
    for context in simulation.contexts.values():
        assert len(owns[context.trace_id]) == 1
    assert not [w for w in simulation.workers if w.context.requests]


def test_a_retracted_request_that_waits_again_is_one_attempt() -> None:
    simulation = Traced(4, aggregated=True, pages=18, growth_min=0.0, growth_max=0.0, cached=False)
    requests = [simulation.submit(prompt, 24) for prompt in random_prompts(4, 2, 20)]
    simulation.run()
    retracted = [span for span in simulation.spans if span.name == QUEUE]
    assert len(retracted) > len(requests)  # it has had memory twice
    simulation.assert_whole()
    owns = [spans[0] for spans in simulation.own_spans().values()]
    assert [own.attributes["kvrelay.outcome"] for own in owns] == ["finished", "finished"]


def test_what_was_not_sampled_is_not_recorded() -> None:
    sampled = TraceContext(new_trace_id(), new_span_id(), sampled=True)
    sink = Traced(0)
    role = WorkerRole.DECODE
    assert begin_trace(None, str(sampled), role, KEY) is None
    assert begin_trace(sink, "", role, KEY) is None
    assert begin_trace(sink, "nonsense", role, KEY) is None
    assert begin_trace(sink, str(replace(sampled, sampled=False)), role, KEY) is None
    assert begin_trace(sink, str(sampled), role, KEY) is not None
