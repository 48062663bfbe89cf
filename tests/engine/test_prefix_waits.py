"""Many requests with one beginning: it is computed once by each worker, and moved once to each."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.scheduler.commands import RetractForDrain, Wake
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.scheduler.prefix_waits import PrefixWaits
from kvrelay.engine.scheduler.request import Request
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease
from kvrelay.mem_cache.prefix.no_prefix_index import NoPrefixIndex
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.wire.output import EndReason
from kvrelay.wire.submit import RequestKey, StopConditions
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.submissions import submit
from tests.engine.test_scenarios import step_until
from tests.known import known
from tests.pairwise import few

PREFIX = random.Random(11).choices(range(97), k=240)
NUMBER = 64
OUTPUT = 4


def make(kind: type[Simulation], seed: int, **options: Any) -> Any:
    sizes = {"page_size": 4, "pages": 900, "rows": NUMBER, "chunk": 32}
    return kind(seed, **{**sizes, **options})


def submit_all(simulation: Simulation, seed: int = 0, number: int = NUMBER) -> list[SimRequest]:
    rng = random.Random(seed)
    suffixes = [[rng.randrange(97) for _ in range(rng.randint(8, 12))] for _ in range(number)]
    return [simulation.submit([*PREFIX, *suffix], OUTPUT) for suffix in suffixes]


def assert_right(requests: list[SimRequest]) -> None:
    for request in requests:
        windows = request.prefill.windows
        assert request.output == reference(request.prompt, request.max_tokens, windows)


def prompt_tokens_computed(worker: SimWorker, requests: list[SimRequest]) -> float:
    generated = sum(OUTPUT - 1 for one in requests if one.decode is worker)
    return count(worker, "computed_tokens") - generated


def distinct_tokens(requests: list[SimRequest]) -> int:
    return len(PREFIX) + sum(len(request.prompt) - len(PREFIX) for request in requests)


def distinct_pages(requests: list[SimRequest]) -> int:
    suffixes = [-(-(len(request.prompt) - len(PREFIX)) // 4) for request in requests]
    return len(PREFIX) // 4 + sum(suffixes)


def assert_once(simulation: Simulation, requests: list[SimRequest], most: float = 1.1) -> None:
    """Each worker has computed, or been sent, hardly more than what is distinct."""
    for worker in simulation.prefills:
        mine = [one for one in requests if one.prefill is worker]
        assert prompt_tokens_computed(worker, mine) <= most * distinct_tokens(mine)
    for worker in simulation.decodes:
        mine = [one for one in requests if one.decode is worker and one.prefill is not worker]
        if mine:
            assert count(worker, "transfer_pages") <= most * distinct_pages(mine)


@pytest.fixture
def roomy_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's pool that can keep more than two requests' windows."""
    shape = SimWorker._shape

    def roomy(self: SimWorker, window: int | None, ahead: int) -> PoolShape:
        return dataclasses.replace(shape(self, window, ahead), total_pages=self.pages)

    monkeypatch.setattr(SimWorker, "_shape", roomy)


KINDS = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="pairs"),
        pytest.param({"aggregated": True}, id="aggregated"),
        pytest.param({"workers": 1}, id="pair"),
        pytest.param({"verify_pages": VerifyPages.ALL}, id="verified"),
        pytest.param({"aggregated": True, "windows": (None, 24)}, id="aggregated-hybrid"),
        pytest.param({"aggregated": True, "speculation": Speculation.NGRAM}, id="speculation"),
    ],
)


@few(4)
@KINDS
@pytest.mark.parametrize("kind", [Simulation, Clockwork], ids=["random", "virtual time"])
def test_one_beginning_is_computed_and_moved_once(
    kind: Any, options: dict[str, Any], roomy_windows: None
) -> None:
    simulation = make(kind, 3, **options)
    requests = submit_all(simulation)
    simulation.run_until(1e6) if kind is Clockwork else simulation.run()
    assert_right(requests)
    if "speculation" not in options:  # what is drafted is computed, too
        assert_once(simulation, requests)
    assert sum(count(worker, "prefix_waits") for worker in simulation.workers)
    simulation.assert_at_baseline()


def test_a_windows_pages_are_found_at_the_end_of_what_is_shared(roomy_windows: None) -> None:
    """On a prefill worker; a decode worker's windows hold the prompts' ends alone."""
    simulation = make(Simulation, 4, windows=(None, 24))
    requests = submit_all(simulation)
    simulation.run()
    assert_right(requests)
    for worker in simulation.prefills:
        mine = [one for one in requests if one.prefill is worker]
        assert prompt_tokens_computed(worker, mine) <= 1.1 * distinct_tokens(mine)
    simulation.assert_at_baseline()


def test_waiting_makes_all_of_them_faster() -> None:
    """By virtual time, in which a token that is computed twice takes time twice."""
    ends = {}
    for bound in (0.0, math.inf):
        simulation = make(Clockwork, 5, prefix_wait=bound)
        requests = submit_all(simulation)
        simulation.run_until(1e6)
        assert_right(requests)
        ends[bound] = max(simulation.ended_at[request] for request in requests)
    assert ends[math.inf] < ends[0.0]


def computing(worker: SimWorker) -> list[Any]:
    return [r for r in worker.context.requests.values() if r.lease is not None]


def one_computes(simulation: Simulation, tokens: int = 64) -> SimRequest:
    """Until so many tokens of the first one are computed; all others hold nothing."""
    prefill = simulation.prefills[0]

    def reached() -> bool:
        return any(one.kv_written_len >= tokens for one in computing(prefill))

    step_until(simulation, reached)
    for worker in simulation.workers:
        counts = worker.kv_cache.audit.counts()
        assert len(computing(worker)) == 1
        assert counts[-1].held == 1, "a row for each that computes, no other"
    return simulation.requests[computing(prefill)[0].key]


@pytest.mark.parametrize("seed", range(4))
def test_when_the_one_that_computes_is_aborted_the_next_one_computes(seed: int) -> None:
    simulation = make(Simulation, seed, workers=1)
    requests = submit_all(simulation)
    first = one_computes(simulation)
    for worker in (first.prefill, first.decode):
        simulation.cancel(first, worker)
    simulation.run()
    others = [request for request in requests if request is not first]
    assert_right(others)
    # A chunk or two of the first were computed for nothing.
    extra = 2 * 32 / distinct_tokens(others)
    assert_once(simulation, others, 1.1 + extra)
    simulation.assert_at_baseline()


@few(1)
@pytest.mark.parametrize("aggregated", [False, True], ids=["pair", "aggregated"])
@pytest.mark.parametrize("seed", range(3))
def test_when_the_one_that_computes_fails_the_next_one_computes_all(
    seed: int, aggregated: bool
) -> None:
    simulation = make(Simulation, seed, workers=1, aggregated=aggregated)
    requests = submit_all(simulation)
    first = one_computes(simulation)
    first.prefill.broken.add(first.key)
    simulation.run()
    assert first.ends[first.prefill.name].reason is EndReason.FAILED
    others = [request for request in requests if request is not first and not request.disturbed]
    assert_right(others)
    simulation.assert_at_baseline()


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_nobody_waits_for_one_that_makes_no_progress(where: str) -> None:
    simulation = make(Simulation, 1, workers=1, prefix_wait=1000.0)
    requests = submit_all(simulation, number=8)
    prefill, decode = simulation.workers
    worker = prefill if where == "prefill" else decode
    one_computes(simulation)
    read = simulation.end_read
    if where == "prefill":
        simulation.can_end_step = lambda one: one is not prefill
        while simulation.step():
            pass
    else:
        simulation.end_read = lambda one: None
        waits = decode.scheduler._grants._waits
        live = decode.context.requests
        step_until(simulation, lambda: any(map(waits.wait_of, live.values())))
        # What arrives later would be progress.
        step_until(simulation, lambda: bool(computing(decode)[0].hand_over.first_tokens))
    assert len(computing(worker)) == 1
    for stuck in [*computing(prefill), *computing(decode)]:
        stuck.progressed_at = -1e9
    for one in simulation.workers:
        one.inbox.post(Wake())
    step_until(simulation, lambda: len(computing(worker)) > 1)
    simulation.end_read = read
    simulation.can_end_step = lambda one: True
    simulation.run()
    assert_right(requests)
    simulation.assert_at_baseline()


@few(2)
@pytest.mark.parametrize("where", ["prefill", "decode", "aggregated"])
@pytest.mark.parametrize("seed", range(3))
def test_a_worker_drains_while_many_wait(seed: int, where: str) -> None:
    simulation = make(Simulation, seed, aggregated=where == "aggregated")
    requests = submit_all(simulation)
    for _ in range(600):
        simulation.step()
    worker = (simulation.decodes if where == "decode" else simulation.prefills)[0]
    worker.drain()
    worker.inbox.post(RetractForDrain())
    while not worker.drained:
        assert simulation.step()
    simulation.replace(worker)
    simulation.run()
    assert_right(requests)
    simulation.assert_at_baseline()


@few(2)
@pytest.mark.parametrize("aggregated", [False, True], ids=["pairs", "aggregated"])
@pytest.mark.parametrize("windows", [(None,), (None, 24), (24,)], ids=["full", "hybrid", "window"])
@pytest.mark.parametrize("seed", range(4))
def test_disturbed_ones_leave_nothing_and_nobody_waiting(
    seed: int, windows: Any, aggregated: bool
) -> None:
    """Short memory, several choices, aborts and broken streams."""
    simulation = make(
        Simulation, seed, pages=120, rows=10, windows=windows, aggregated=aggregated,
        growth_min=0.0, growth_max=0.2,
    )  # fmt: skip
    rng = random.Random(seed)
    for _ in range(40):
        prompt = [*PREFIX[: rng.choice((60, 120, 240))], *(rng.randrange(97) for _ in range(9))]
        choices = rng.choice((1, 1, 1, 3))
        simulation.submit_choices(choices, prompt, rng.randint(1, 20), rng.randint(0, 1))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
        if rng.random() < 0.2:
            victim = rng.choice(simulation.submitted)
            for worker in {victim.prefill, victim.decode}:
                simulation.cancel(victim, worker)
        if rng.random() < 0.1 and not aggregated:
            simulation.break_stream()
    simulation.run()
    for request in simulation.submitted:
        if not request.disturbed:
            expected = reference(
                request.prompt, request.max_tokens, windows, choice=request.key.choice
            )
            assert request.output == expected
    simulation.assert_at_baseline()


def submit_to(
    simulation: Simulation, prompt: list[int], prefill: SimWorker, decode: SimWorker
) -> SimRequest:
    before = simulation.prefills, simulation.decodes
    simulation.prefills, simulation.decodes = [prefill], [decode]
    request = simulation.submit(prompt, OUTPUT)
    simulation.prefills, simulation.decodes = before
    return request


def test_one_that_its_decode_worker_lets_wait_leads_nobody_for_another() -> None:
    simulation = make(Simulation, 1)
    [slow, free], [busy, empty] = simulation.prefills, simulation.decodes
    simulation.can_end_step = lambda worker: worker is not slow
    first = submit_to(simulation, PREFIX, slow, busy)
    simulation.run()
    waits, follows = (submit_to(simulation, [*PREFIX, n], free, busy) for n in range(2))
    simulation.run()
    held = free.context.requests[waits.key]
    assert held.hand_over.is_held
    follower = free.context.requests[follows.key]
    wait = free.scheduler._queue._waits.wait_of(follower)
    assert wait.leader is held, "both would wait for the same"
    other = submit_to(simulation, [*PREFIX, 2], free, empty)
    simulation.run()
    assert_right([other])
    assert not any(request.output for request in (first, waits, follows))
    simulation.can_end_step = lambda worker: True
    slow.inbox.post(Wake())
    simulation.run()
    assert_right([first, waits, follows])
    simulation.assert_at_baseline()


# Who waits for whom


class Bench:
    """One worker's memory, in which `leader` computes and `request` may wait."""

    def __init__(
        self,
        *,
        keeps: bool = True,
        at_end: bool = False,
        windows: Any = (None,),
        bound: float = 5.0,
    ) -> None:
        shapes = [PoolShape(f"pool{n}", 100, window) for n, window in enumerate(windows)]
        index = (RadixTree if keeps else NoPrefixIndex)(4, windows)
        self.kv_cache = KVCacheManager(
            shapes, page_size=4, total_rows=8, max_row_tokens=400, index=index
        )
        config = WorkerConfig("w", WorkerRole.PREFILL, None, "sim")  # type: ignore[arg-type]
        outbox = Outbox(lambda function, *args: function(*args))
        context: SchedulerContext[Request] = SchedulerContext(
            self.kv_cache, outbox, WorkerMetrics(config)
        )
        self.waits = PrefixWaits(
            context, bound, lambda r: r.lease is not None, at_end=lambda _: at_end
        )
        self.leader = self.request(PREFIX)
        self.leader.lease = known(self.kv_cache.open("leader", len(PREFIX)))

    def request(self, prompt: list[int], **fields: Any) -> Request:
        key, stops = RequestKey("router", "1", 1), StopConditions(max_tokens=4)
        return Request.of(submit(RouterLink("router"), key, prompt, stops, **fields))

    def must_wait(self, request: Request) -> bool:
        return self.waits.must_wait(request, request.reusable_len, [self.leader])

    def publish(self, tokens: int, lease: Lease | None = None) -> bool:
        """Compute so many tokens, of the leader unless it is another lease; were they new?"""
        lease = lease or self.leader.held
        assert self.kv_cache.grow(lease, tokens)
        self.kv_cache.commit(lease, tokens)
        if lease is self.leader.lease:
            self.leader.kv_written_len = tokens
        return self.kv_cache.sharing.publish_settled(lease, np.asarray(PREFIX[:tokens], np.int32))


def test_a_wait_ends_when_what_is_shared_is_published() -> None:
    bench = Bench()
    request = bench.request([*PREFIX[:100], *range(20)])
    assert bench.must_wait(request)
    bench.publish(64)
    assert bench.must_wait(request)
    bench.publish(104)
    assert not bench.must_wait(request)


def test_a_wait_ends_when_somebody_else_has_published_what_is_shared() -> None:
    bench = Bench()
    request = bench.request([*PREFIX[:100], *range(20)])
    assert bench.must_wait(request)
    bench.leader = bench.request(PREFIX[:104])
    bench.leader.lease = known(bench.kv_cache.open("somebody else", 104))
    bench.publish(64)
    assert bench.must_wait(request)
    bench.publish(104)
    assert not bench.must_wait(request)


def test_a_leader_whose_pages_are_copies_is_not_waited_for() -> None:
    """The index takes none of its later pages either, until it is released."""
    bench = Bench()
    request, late = (bench.request([*PREFIX[:200], *range(20)]) for _ in range(2))
    assert bench.must_wait(request)
    assert bench.publish(64, known(bench.kv_cache.open("who was quicker", 64)))
    assert not bench.publish(64)
    assert not bench.must_wait(request)
    assert not bench.must_wait(late)


def test_what_was_evicted_again_is_not_waited_for() -> None:
    bench = Bench()
    request = bench.request([*PREFIX[:100], *range(20)])
    bench.publish(104)
    release_kv_cache(bench.kv_cache, bench.leader.held, Outcome.ABORTED)
    every = known(bench.kv_cache.open("all of it", 400))
    assert bench.kv_cache.grow(every, 400)
    release_kv_cache(bench.kv_cache, every, Outcome.ABORTED)
    bench.leader.lease = known(bench.kv_cache.open("leader", len(PREFIX)))
    bench.leader.kv_written_len = 0
    assert bench.must_wait(request), "it computes it again"
    bench.leader.has_ended = True
    assert not bench.must_wait(request)


UNLIKE: dict[str, Callable[[Bench], Request]] = {
    "another tenant": lambda bench: bench.request(PREFIX, namespace="other"),
    "more urgent": lambda bench: bench.request(PREFIX, priority=-1),
    "scores its prompt": lambda bench: bench.request(PREFIX, prompt_logprobs=1),
    "another beginning": lambda bench: bench.request([1, 2, 3, *PREFIX]),
    "too little": lambda bench: bench.request([*PREFIX[:8], *range(90)]),
    "less than a page": lambda bench: bench.request(PREFIX[:4]),
}


@pytest.mark.parametrize("which", UNLIKE)
def test_who_does_not_wait(which: str) -> None:
    bench = Bench()
    assert bench.must_wait(bench.request(PREFIX))
    assert not bench.must_wait(UNLIKE[which](bench))


def test_without_an_index_nobody_waits() -> None:
    bench = Bench(keeps=False)
    assert not bench.must_wait(bench.request(PREFIX))


def test_without_a_bound_nobody_waits() -> None:
    """Not even in the moment in which a leader made progress."""
    bench = Bench(bound=0.0)
    bench.leader.progressed_at = math.inf
    assert not bench.must_wait(bench.request(PREFIX))


@pytest.mark.parametrize(
    ("shared", "windows", "waits"),
    [(240, (None,), True), (120, (None,), True), (100, (None,), False), (236, (None, 24), False),
     (240, (None, 24), True)],
)  # fmt: skip
def test_the_end_of_another_prompt_is_waited_for_if_most_of_it_is_shared(
    shared: int, windows: Any, waits: bool
) -> None:
    bench = Bench(at_end=True, windows=windows)
    assert bench.must_wait(bench.request([*PREFIX[:shared], *range(20)])) is waits
