"""The assembly of an aggregated worker."""

from __future__ import annotations

from typing import Never

import grpc

from kvrelay.aggregated_worker.scheduler import AggregatedRequest, AggregatedScheduler
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker


class AggregatedPlugin:
    """The aggregated worker's own part: a scheduler, and no peers."""

    def __init__(self, parts: WorkerParts[AggregatedRequest, Never]) -> None:
        self.scheduler = AggregatedScheduler(parts.context, parts.tokenizer, parts.config)

    def register(self, server: grpc.aio.Server) -> None:
        """Add nothing: only routers call it."""

    async def peer_died(self, incarnation: str) -> None:
        """Do nothing: there are no connections to other workers."""

    async def close(self) -> None:
        """Do nothing: nothing runs on the event loop."""


def build(config: WorkerConfig) -> Worker:
    """Make an aggregated worker that is not started yet."""
    return Worker(config, AggregatedPlugin)
