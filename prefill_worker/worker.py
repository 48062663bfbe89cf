"""A prefill worker, put together."""

from __future__ import annotations

import grpc

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import Worker, WorkerParts
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.prefill_worker.service import HandOverService
from kvrelay.v1 import hand_over_pb2_grpc


class PrefillPlugin:
    """See `engine.worker.RolePlugin`."""

    def __init__(self, parts: WorkerParts) -> None:
        self.role = PrefillRole(parts.core, parts.agent, parts.inbox, parts.tokenizer, parts.config)
        self._service = HandOverService(parts.agent, parts.inbox)

    def register(self, server: grpc.aio.Server) -> None:
        """Serve the decode workers."""
        hand_over_pb2_grpc.add_HandOverServiceServicer_to_server(self._service, server)

    async def peer_died(self, incarnation: str) -> None:
        """There are no connections to decode workers; the role drops its streams."""

    async def close(self) -> None:
        """Streams end with the server."""


def build(config: WorkerConfig) -> Worker:
    """A prefill worker that is not started yet."""
    return Worker(config, PrefillPlugin)
