"""An aggregated worker, put together."""

from __future__ import annotations

import grpc

from kvrelay.aggregated_worker.role import AggregatedRole
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import Worker, WorkerParts


class AggregatedPlugin:
    """See `engine.worker.RolePlugin`: it has no peers."""

    def __init__(self, parts: WorkerParts) -> None:
        self.role = AggregatedRole(parts.core, parts.tokenizer, parts.config)

    def register(self, server: grpc.aio.Server) -> None:
        """Nobody calls it but routers."""

    async def peer_died(self, incarnation: str) -> None:
        """No matter."""

    async def close(self) -> None:
        """Nothing runs on the event loop."""


def build(config: WorkerConfig) -> Worker:
    """An aggregated worker that is not started yet."""
    return Worker(config, AggregatedPlugin)
