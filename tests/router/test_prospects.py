"""Whether a request may wait for workers that are on their way."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.placement import fleet as fleet_module
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.limits import Prospects
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

from .cluster import running

ROLES = list(WorkerRole)


def fits(workers: list[WorkerInfo], role: WorkerRole, tokens: int) -> bool:
    return any(one.role is role and one.pool_tokens >= tokens for one in workers)


@pytest.mark.parametrize("alone", [False, True])
async def test_any_of_those_that_come_may_complete_a_pair(config: RouterConfig, alone: bool):
    async with running(config, "prefill-0", "decode-0") as cluster:
        some = cluster.prefill.endpoint
    rng = random.Random(1)
    for _ in range(400):
        workers = [
            dataclasses.replace(some, role=rng.choice(ROLES), pool_tokens=rng.choice((10, 20, 30)))
            for _ in range(rng.randint(0, 4))
        ]
        ready, coming = workers[: len(workers) // 2], workers[len(workers) // 2 :]
        demand = Demand(rng.randint(1, 35), 35)
        prefill, decode, aggregated = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.AGGREGATED
        demand = dataclasses.replace(demand, total_tokens=rng.randint(demand.input_tokens, 35))
        pair = fits(workers, prefill, demand.input_tokens) and fits(
            workers, decode, demand.total_tokens
        )
        one_comes = fits(coming, prefill, demand.input_tokens) or fits(
            coming, decode, demand.total_tokens
        )
        expected = (
            (pair and one_comes)
            or fits(coming, aggregated, demand.total_tokens)
            or (alone and fits(coming, decode, demand.total_tokens))
        )
        prospects = Prospects.of(ready, coming, decodes_alone=alone)
        assert prospects.promise(demand) is expected, (workers, demand)


async def test_workers_are_looked_through_only_when_they_have_changed(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(config, "prefill-0", "decode-0") as cluster:
        fleet, demand = cluster.router._fleet, Demand(3, 11)
        looked: list[WorkerLink] = []
        assert not fleet.expects(demand)
        takes = fleet_module._takes_requests

        def look(link: WorkerLink) -> bool:
            looked.append(link)
            return takes(link)

        monkeypatch.setattr(fleet_module, "_takes_requests", look)
        assert not any(fleet.expects(demand) for _ in range(100))
        assert not looked
        await cluster.decode.stop()
        await cluster.until_lost("decode-0")
        assert fleet.expects(demand), "it may come back"
