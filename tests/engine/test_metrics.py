"""What a scrape says is what the audit counts."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.engine.faults import parse_faults
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from tests.engine.simulation import Simulation, SimWorker


def scrape(worker: SimWorker) -> dict[tuple[str, str, str], float]:
    """Values by metric, pool and state."""
    text = generate_latest(worker.context.metrics.registry).decode()
    return {
        (sample.name, sample.labels.get("pool", ""), sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_sums_to_the_pools_and_counts_what_the_index_does():
    simulation = Simulation(0, page_size=4, pages=8, rows=4, chunk=16, windows=(None, 5))
    del simulation.prefills[1:], simulation.decodes[1:]
    prompt = list(range(20))
    for _ in range(2):
        simulation.submit(prompt, 2)
        simulation.run()
    simulation.submit(prompt[::-1], 2)
    simulation.run()
    worker = simulation.prefills[0]
    seen = scrape(worker)
    for counts in worker.kv_cache.audit.counts():
        states = {state: v for (n, pool, state), v in seen.items()
                  if n == "kvrelay_pages" and pool == counts.pool}  # fmt: skip
        assert sum(states.values()) == counts.total
        assert states["cached_evictable"] == counts.cached_evictable
        assert seen["kvrelay_pool_pages", counts.pool, ""] == counts.total
        assert seen["kvrelay_promised_pages", counts.pool, ""] == counts.promised
    assert seen["kvrelay_prefix_lookups_total", "", ""] == 3
    assert seen["kvrelay_prefix_hits_total", "", ""] == 1
    # The last token is computed, and a hit ends where a page does.
    assert seen["kvrelay_prefix_hit_tokens_total", "", ""] == 16
    # So its page was computed twice, in both pools.
    assert seen["kvrelay_prefix_duplicate_pages_total", "", ""] == 2
    assert seen["kvrelay_prefix_evicted_pages_total", "", ""] > 0
    assert seen["kvrelay_audit_failures_total", "", ""] == 0


def test_the_way_of_products_is_an_info():
    worker = Simulation(0, page_size=4, pages=8, rows=4, chunk=16).prefills[0]
    worker.context.metrics.product_ways = {"960 x 576": "own"}
    text = generate_latest(worker.context.metrics.registry).decode()
    [line] = [one for one in text.splitlines() if one.startswith("kvrelay_cpu_products_info{")]
    assert 'way="own",weights="960 x 576",' in line


def test_a_wrong_account_is_counted_and_stops_the_engine(monkeypatch: pytest.MonkeyPatch):
    simulation = Simulation(0, page_size=4, pages=8, rows=4, chunk=16)
    worker = simulation.prefills[0]

    def take_a_free_page(scheduler: PrefillScheduler) -> None:
        """The prefix index believes that it has a page that nobody gave it."""
        pages = [np.zeros(1, np.int32) for _ in worker.kv_cache.shape.pools]
        worker.kv_cache.index.insert(np.arange(4, dtype=np.int32), pages)

    monkeypatch.setattr(PrefillScheduler, "admit", take_a_free_page)
    with pytest.raises(ConservationError):
        worker.turn()
    assert scrape(worker)["kvrelay_audit_failures_total", "", ""] == 1


def test_a_page_that_is_lost_on_purpose_is_found():
    simulation = Simulation(0, page_size=4, pages=8, rows=4, chunk=16)
    del simulation.prefills[1:], simulation.decodes[1:]
    worker = simulation.prefills[0]
    faults = worker.context.faults
    faults.lose_page = worker.kv_cache.audit.lose_page
    faults.arm(parse_faults("lose:queued"))
    simulation.submit(list(range(8)), 2)
    with pytest.raises(ConservationError):
        simulation.run()
    assert faults.fired == 1
