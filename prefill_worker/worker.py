"""The assembly of a prefill worker."""

from __future__ import annotations

import grpc

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker
from kvrelay.prefill_worker.hand_over_service import HandOverService
from kvrelay.prefill_worker.request import PrefillMessage, PrefillRequest
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.v1 import hand_over_pb2_grpc


class PrefillPlugin:
    """The prefill worker's own part: its scheduler and its end of the hand-over."""

    def __init__(self, parts: WorkerParts[PrefillRequest, PrefillMessage]) -> None:
        self.scheduler = PrefillScheduler(
            parts.context, parts.agent, parts.inbox, parts.tokenizer, parts.config
        )
        self._service = HandOverService(parts.agent, parts.inbox)

    def register(self, server: grpc.aio.Server) -> None:
        """Serve the decode workers."""
        hand_over_pb2_grpc.add_HandOverServiceServicer_to_server(self._service, server)

    async def peer_died(self, incarnation: str) -> None:
        """Do nothing: decode workers connect to this one, and the scheduler ends their streams."""

    async def close(self) -> None:
        """Do nothing: streams end with the server."""


def build(config: WorkerConfig) -> Worker:
    """Make a prefill worker that is not started yet."""
    return Worker(config, PrefillPlugin)
