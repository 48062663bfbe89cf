"""What the tests of supervised workers share: configurations, lives, and what workers were told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from kvrelay.deploy.controller.cluster import Cluster
from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.engine.config import WorkerConfig
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

SECONDS = 60
"""Until what is awaited must have happened."""
TIMEOUT_SECONDS = 3.0
"""`--worker-timeout` of the workers."""


def make_configs(folder: Path) -> list[WorkerConfig]:
    return [
        WorkerConfig(
            name=f"{role}-0",
            role=role,
            model_path=folder,
            model_name="none",
            metrics_port=9401 + number,
            worker_timeout=TIMEOUT_SECONDS,
        )
        for number, role in enumerate(WorkerRole)
    ]


async def next_life(cluster: Cluster | ClusterThread, before: WorkerInfo) -> WorkerInfo:
    """The incarnation that follows `before`, once discovery has it."""
    async with asyncio.timeout(SECONDS):
        while (info := cluster.workers.get(before.name, before)) == before:
            await cluster.discovery.changed()
    return info


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


def is_running(worker: WorkerInfo) -> bool:
    return runs(worker.pid)


def runs(pid: int) -> bool:
    """Whether the process still does anything: its parent may not have asked how it ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def was_told(orders: Path, worker: str, dead: WorkerInfo) -> bool:
    return heard(orders, worker)[-1:] == [dead.incarnation]


def heard(orders: Path, worker: str) -> list[str]:
    """The dead that a worker was told of, in all its lives."""
    path = orders / f"{worker}.heard"
    return path.read_text().split() if path.exists() else []
