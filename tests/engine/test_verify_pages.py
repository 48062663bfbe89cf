"""Pages that do not arrive as they were computed, under a random scheduler."""

from __future__ import annotations

import random

import pytest

from kvrelay.kv_transfer.pull import Pull
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.wire.output import EndReason, FailureReason
from tests.engine.simulation import Simulation, SimWorker, count, reference
from tests.pairwise import few


class Corrupting(Simulation):
    """Some reads bring another byte than was computed."""

    share = 0.3

    def on_read(self, worker: SimWorker, pull: Pull) -> None:
        if self.random.random() < self.share:
            pools = [n for n, pages in enumerate(pull.local_pages) if len(pages)]
            pool = self.random.choice(pools)
            page = self.random.choice(pull.local_pages[pool].tolist())
            # A page's first token has always settled.
            worker.counting.kv[pool][page, 0] ^= 1 << self.random.randrange(6)


def total(workers: list[SimWorker], counter: str) -> float:
    return sum(count(worker, counter) for worker in workers)


@few(2)
@pytest.mark.parametrize("windows", [(None,), (None, 7)], ids=["full", "hybrid"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_token_comes_of_a_page_that_is_not_as_it_was_computed(seed, page_size, windows):
    simulation = Corrupting(
        seed, page_size, 160 // page_size, 6, 16, windows=windows, verify_pages=VerifyPages.ALL
    )
    rng = random.Random(seed)
    requests = []
    for _ in range(40):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 60))]
        requests.append(simulation.submit(prompt, rng.randint(2, 12)))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
    simulation.run()
    failed = 0
    for request in requests:
        expected = reference(request.prompt, request.max_tokens, windows)
        assert request.output == expected[: len(request.output)]
        end = request.ends[request.decode.name]
        if end.reason is EndReason.FAILED:
            failed += 1
            assert end.cause is FailureReason.PAGE_MISMATCH
        else:
            assert request.output == expected
    assert 0 < failed < 40
    assert total(simulation.decodes, "page_mismatches") >= failed
    simulation.assert_at_baseline()


def test_such_a_page_is_in_nobodys_prefix_index():
    simulation = Corrupting(0, 4, 60, 6, 16, verify_pages=VerifyPages.ALL)
    del simulation.prefills[1:], simulation.decodes[1:]
    simulation.share = 1.0
    prompt = list(range(40))
    simulation.submit(prompt, 4)
    simulation.run()
    assert total(simulation.decodes, "page_mismatches") == 3  # one of each read
    for worker in simulation.workers:
        assert worker.kv_cache.audit.page_counts()[0].cached_evictable == 0
    simulation.share = 0.0
    again = simulation.submit(prompt, 4)
    simulation.run()
    assert again.output == reference(prompt, 4)
    assert total(simulation.decodes, "verified_pages") == 20


def test_a_sample_is_of_one_page_at_least():
    simulation = Simulation(0, 4, 60, 6, 16, verify_pages=VerifyPages.SAMPLE, cached=False)
    for length in (1, 9, 40):
        simulation.submit(list(range(length)), 3)
    simulation.run()
    assert total(simulation.decodes, "verified_pages") == 3
    assert total(simulation.decodes, "page_mismatches") == 0
    simulation.assert_at_baseline()


def test_nothing_is_hashed_unless_it_was_asked_for():
    simulation = Simulation(0, 4, 60, 6, 16)
    simulation.submit(list(range(40)), 3)
    simulation.run()
    assert total(simulation.decodes, "verified_pages") == 0


@pytest.mark.parametrize("seed", range(8))
def test_disturbance_while_pages_are_compared_harms_nobody(seed):
    simulation = Simulation(seed, 4, 40, 6, 16, verify_pages=VerifyPages.ALL)
    rng = random.Random(seed)
    requests = []
    for _ in range(60):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 60))]
        requests.append(simulation.submit(prompt, rng.randint(2, 12)))
        for _ in range(rng.randint(0, 40)):
            simulation.step()
        if rng.random() < 0.4:
            victim = rng.choice(requests)
            for worker in rng.sample([victim.prefill, victim.decode], rng.randint(1, 2)):
                simulation.cancel(victim, worker)
        if rng.random() < 0.2:
            simulation.break_stream()
    simulation.run()
    for request in requests:
        if not request.disturbed:
            assert request.output == reference(request.prompt, request.max_tokens)
    assert total(simulation.decodes, "page_mismatches") == 0, "of a request that was over"
    simulation.assert_at_baseline()
