"""Routers that are led from one real cluster to another one, under load."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.commands import kvrelay
from tests.cluster.test_controller_outage import name as name  # a fixture
from tests.cluster.test_controller_outage import routed

pytestmark = pytest.mark.slow


async def test_a_router_is_led_to_another_cluster_and_no_request_is_lost(tiny: Path, name: str):
    """The new cluster's pages have another size: nothing of the two fits together."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(routed(tiny, name))
        other = await stack.enter_async_context(routed(tiny, f"{name}b", page_size=8))
        prompt = list(range(3, 60))
        sampling: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
        expected = (await cluster.generate(prompt, **sampling)).tokens
        stopped = asyncio.Event()

        async def load() -> int:
            asked = 0
            while not stopped.is_set():
                assert (await cluster.generate(prompt, **sampling)).tokens == expected
                asked += 1
            return asked

        old = str(await asyncio.to_thread(cluster.controller.find))
        new = str(await asyncio.to_thread(other.controller.find))
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(load()) for _ in range(4)]
            done = await kvrelay("shift", "--controller", old, "--to", new, "--drain")
            assert done.returncode == 0, done.stdout + done.stderr
            stopped.set()
        assert all(client.result() for client in clients)
        lines = done.stdout.splitlines()
        assert lines[0] == f"New requests of all 1 routers go to the workers of {new}."
        left = {line.partition("  (")[0] for line in lines if "has left" in line}
        assert left == {"decode-0 has left", "prefill-0 has left"}
        theirs = {one.incarnation for one in (await other.state()).workers}
        async with asyncio.timeout(60):
            while {one.incarnation for one in await cluster.status()} != theirs:
                await asyncio.sleep(0.05)
        assert (await cluster.generate(prompt, **sampling)).tokens == expected
        assert await cluster.metric("kvrelay_requests_total", outcome="unavailable") == 0
        await cluster.assert_at_baseline()
        assert not (await cluster.state()).workers
        refused = await kvrelay("shift", "--controller", new, "--to", old)
        assert "--back ends that" in refused.stderr
