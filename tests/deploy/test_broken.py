"""What ends the renewal of a controller's lease ends its process: a real one, in each form."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvrelay.deploy.controller import cluster
from kvrelay.deploy.controller.cluster import BROKEN
from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.deploy.controller.controller_host import ControllerHost
from kvrelay.deploy.controller.controller_spec import SPEC, ControllerSpec
from kvrelay.deploy.controller.records.key_value_store import InProcessStore, KeyValueStore
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from tests.pairwise import few

SECONDS = 60


class BreakingStore(InProcessStore):
    """Fails in a way that nobody expects, once the controller has begun its epoch."""

    looks = 0

    async def keys(self, prefix: str) -> list[str]:
        if prefix == "epoch/" and await self.get("epoch/1") is not None:
            self.looks += 1
            if self.looks > 2:  # those of `begin_epoch`
                raise RuntimeError("a bug")
        return await super().keys(prefix)


class StoreWithSpec(BreakingStore):
    async def get(self, key: str) -> bytes | None:
        if key == SPEC:
            spec = ControllerSpec("c", (), PlacementPlan(), 30, advertised={"": "127.0.0.1"})
            return spec.to_bytes()
        return await super().get(key)


class BreakingHost(ControllerHost):
    def make_store(self) -> KeyValueStore:
        return StoreWithSpec()


async def serve() -> None:
    async with ClusterThread([]):
        await asyncio.sleep(SECONDS)


def run(form: str) -> None:
    """In a process of its own."""
    cluster._CONTROLLER_LEASE_SECONDS = 0.3  # type: ignore[misc]
    setattr(cluster, "InProcessStore", BreakingStore)  # noqa: B010 (no name that it exports)
    if form == "serve":
        asyncio.run(serve())
    else:
        BreakingHost("kvrelay/c", 30)
        threading.Event().wait(SECONDS)


@few(1)
@pytest.mark.parametrize("form", ["serve", "detached"])
def test_a_process_that_no_longer_renews_its_lease_says_so_and_ends(form: str):
    root = Path(__file__).parents[2]
    code = f"from tests.deploy.test_broken import run; run({form!r})"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert ended.returncode == BROKEN, ended.stderr
    assert "the controller no longer renews its lease" in ended.stderr
    assert "RuntimeError: a bug" in ended.stderr
