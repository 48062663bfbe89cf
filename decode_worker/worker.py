"""The assembly of a decode worker."""

from __future__ import annotations

import grpc

from kvrelay.decode_worker.hand_over_client import HandOverClient
from kvrelay.decode_worker.request import DecodeRequest
from kvrelay.decode_worker.scheduler import DecodeMessage, DecodeScheduler
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import WorkerParts
from kvrelay.engine.worker.worker import Worker
from kvrelay.kv_transfer.transport_probe import TransportProber
from kvrelay.net.channels import worker_credentials


class DecodePlugin:
    """The decode worker's own part: its scheduler and its end of the hand-over."""

    def __init__(self, parts: WorkerParts[DecodeRequest, DecodeMessage]) -> None:
        config = parts.config
        self._client = HandOverClient(
            parts.agent,
            TransportProber(parts.agent, config.min_transfer_gigabytes_per_second * 1e9),
            parts.inbox,
            parts.vocab_size,
            worker_credentials(config.tls),
        )
        self.scheduler = DecodeScheduler(
            parts.context, parts.agent, self._client, parts.inbox, parts.tokenizer, parts.config
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Add nothing: only routers call a decode worker."""

    async def peer_died(self, incarnation: str) -> None:
        """Drop the connection to a prefill worker that is gone."""
        await self._client.forget_peer(incarnation)

    async def close(self) -> None:
        """End the hand-over streams."""
        await self._client.close()


def build(config: WorkerConfig) -> Worker:
    """Make a decode worker that is not started yet."""
    return Worker(config, DecodePlugin)
