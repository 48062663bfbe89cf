"""A decode worker, put together."""

from __future__ import annotations

import grpc

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.decode_worker.stream import HandOverClient
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker import Worker, WorkerParts
from kvrelay.net.ends import worker_credentials


class DecodePlugin:
    """See `engine.worker.RolePlugin`."""

    def __init__(self, parts: WorkerParts) -> None:
        config = parts.config
        self._client = HandOverClient(
            parts.agent,
            parts.inbox,
            parts.vocab_size,
            config.min_transfer_gbps,
            worker_credentials(config.tls),
        )
        self.role = DecodeRole(
            parts.core, parts.agent, self._client, parts.inbox, parts.tokenizer, parts.config
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Nobody calls a decode worker but routers."""

    async def peer_died(self, incarnation: str) -> None:
        """A prefill worker is gone."""
        await self._client.forget(incarnation)

    async def close(self) -> None:
        """End the hand-over streams."""
        await self._client.close()


def build(config: WorkerConfig) -> Worker:
    """A decode worker that is not started yet."""
    return Worker(config, DecodePlugin)
