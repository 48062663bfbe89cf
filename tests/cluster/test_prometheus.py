"""A real Prometheus scrapes a loaded cluster: every panel and every rule has data."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from docs.tools.dashboards.pages import DASHBOARDS
from kvrelay.engine.faults import parse_faults
from kvrelay.v1 import inference_pb2 as pb
from tests.arming import arm
from tests.cluster.prometheus import MISSING, RULES, Prometheus, scraping
from tests.cluster.running import RunningCluster, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
AT_ONCE = 4
SECONDS = 90
WINDOW_SECONDS = 20.0
CHOSEN = {
    **dict.fromkeys(("$cluster", "$role", "$worker", "$pool"), ".*"),
    "$__rate_interval": "10s",
    "$__range": "5m",
}
"""In place of Grafana's variables."""
SELECTOR = re.compile(r"\b(?:kvrelay_\w+|up)\b(?:\{[^}]*\})?|\w+:kvrelay_\w+(?::\w+)?")


@pytest.fixture(scope="module")
async def cluster(
    ray: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningCluster]:
    async with running(
        tiny,
        dtype="float32",
        kv_memory=16 << 20,
        host_kv_memory=8 << 20,
        kv_storage=str(tmp_path_factory.mktemp("storage")),
        kv_storage_size=64 << 20,
        decode=2,
        cluster_name="watched",
        verify_pages="sample",
        worker_wait=60.0,
        debug_faults="decode-0/fail:pull:3",
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def prometheus(
    cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """Under load, for as long as it runs."""
    folder = tmp_path_factory.mktemp("prometheus")
    enough = asyncio.Event()
    load = [
        asyncio.create_task(generate_until(enough, cluster, number)) for number in range(AT_ONCE)
    ]
    load.append(asyncio.create_task(talk_until(enough, cluster)))
    try:
        async with scraping(cluster.deployment.router.metrics_address, folder) as prometheus:
            yield prometheus
    finally:
        enough.set()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*load)
    await cluster.assert_at_baseline()


async def generate_until(enough: asyncio.Event, cluster: RunningCluster, number: int) -> None:
    """One request after the other; those of one client begin alike."""
    shared = [number + 1] * 48
    turn = 0
    while not enough.is_set():
        turn += 1
        prompt = [*shared, *range(turn % 100 + 2, turn % 100 + 34)]
        answer = await cluster.generate(prompt, max_tokens=16, ignore_eos=True)
        assert len(answer.tokens) == 16


async def talk_until(enough: asyncio.Event, cluster: RunningCluster) -> None:
    """One session after the other, of two turns each."""
    number = 0
    while not enough.is_set():
        number += 1
        name = f"session-{number}"
        await cluster.stub.OpenSession(pb.OpenSessionRequest(session_id=name))
        for first in (10, 20):
            request = pb.GenerateRequest(
                session_id=name,
                input_ids=pb.TokenIds(ids=range(first, first + 8)),
                sampling_params=pb.SamplingParams(max_tokens=8, ignore_eos=True),
            )
            async for _ in cluster.stub.Generate(request):
                pass
        await cluster.stub.CloseSession(pb.CloseSessionRequest(session_id=name))


def with_choice(expr: str) -> str:
    for variable, value in CHOSEN.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


async def until_it_has_data(prometheus: Prometheus, expr: str) -> None:
    """Wait until a series of the query has had a number lately."""
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                series = await prometheus.series(expr, WINDOW_SECONDS)
                if any(math.isfinite(value) for values in series for value in values):
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"no data: {expr}")


async def test_every_panel_has_data(prometheus: Prometheus):
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                await until_it_has_data(prometheus, with_choice(query.expr))


async def test_every_choice_has_values(prometheus: Prometheus):
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            metric = with_choice(variable.metric)
            data = await prometheus.ask(f"label/{variable.label}/values", **{"match[]": metric})
            assert data, variable


async def test_every_rule_is_evaluated_and_reads_metrics_that_there_are(prometheus: Prometheus):
    written = [
        one for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]
    ]
    for rule in written:
        for selector in SELECTOR.findall(rule["expr"]):
            await until_it_has_data(prometheus, selector)
        if "record" in rule:
            await until_it_has_data(prometheus, rule["record"])
    async with asyncio.timeout(SECONDS):
        while "unknown" in (health := await health_of_rules(prometheus)):
            await asyncio.sleep(0.5)  # until the group's next evaluation
    assert health == ["ok"] * len(written)


async def health_of_rules(prometheus: Prometheus) -> list[str]:
    groups = (await prometheus.ask("rules"))["groups"]
    return [rule["health"] for group in groups for rule in group["rules"]]


async def test_the_states_of_each_pool_sum_to_it_at_every_scrape(prometheus: Prometheus):
    [values] = await prometheus.series(
        "sum(abs(sum without (state) (kvrelay_pages) - kvrelay_pool_pages))", WINDOW_SECONDS
    )
    assert set(values) == {0.0}


async def test_a_violation_of_conservation_fires_its_alert(
    cluster: RunningCluster, prometheus: Prometheus
):
    before = cluster.deployment.cluster.workers["decode-0"]
    assert "KvrelayConservationViolated" not in await prometheus.firing()
    await cluster.deployment.cluster.call(arm, "decode-0", parse_faults("lose:decoding"))
    async with asyncio.timeout(SECONDS):
        while "KvrelayConservationViolated" not in (firing := await prometheus.firing()):
            await asyncio.sleep(0.5)
    labels = firing["KvrelayConservationViolated"]
    assert (labels["cluster"], labels["worker"], labels["cause"]) == (
        "watched",
        "decode-0",
        "conservation",
    )
    # Its successor is at another port, and found there.
    async with asyncio.timeout(SECONDS):
        while True:
            now = cluster.deployment.cluster.workers.get("decode-0", before)
            if now != before:
                break
            await asyncio.sleep(0.1)
        assert now.metrics_address != before.metrics_address
        while not any(
            one["labels"]["instance"] == "decode-0"
            and now.metrics_address in one["scrapeUrl"]
            and one["health"] == "up"
            for one in (await prometheus.ask("targets"))["activeTargets"]
        ):
            await asyncio.sleep(0.5)
