"""A worker without model, pages or NIXL, which `deploy` starts and supervises like any other."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router_tokens import PREFILL_SECONDS, VOCAB, SteppingWorker
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.worker.worker_lease import WorkerLease
from kvrelay.net.channels import bind, worker_server
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

STEP_SECONDS = 0.03
BEGIN_SECONDS = 60.0
"""For the processes of all workers to start."""


@dataclass(frozen=True)
class Begun:
    """The workers whose start has begun, as files of a folder that all of them reach."""

    folder: Path
    wanted: int
    """How many must have begun before any of them is ready."""

    async def wait(self, name: str) -> None:
        """Begin, and wait for the others. Raises TimeoutError if they do not begin."""
        (self.folder / name).touch()
        give_up_at = time.monotonic() + BEGIN_SECONDS
        while (found := sum(1 for _ in self.folder.iterdir())) < self.wanted:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{found} of {self.wanted} workers start at a time")
            await asyncio.sleep(STEP_SECONDS)


class CountingWorker:
    """Implements `HostedWorker`.

    Args:
        tokenizer: the digest of the one that the router has.
        begun: whom it starts with.
        config: who it is.
    """

    def __init__(self, tokenizer: str, begun: Begun, config: WorkerConfig) -> None:
        self._tokenizer = tokenizer
        self._begun = begun
        self._config = config
        self._drains = asyncio.Event()
        is_prefill = config.role is WorkerRole.PREFILL
        self._stepping = SteppingWorker(PREFILL_SECONDS if is_prefill else STEP_SECONDS)
        self._server = worker_server()
        self.weights_read = 1.0
        self.lease = WorkerLease()
        self.faults = FaultPlan()

    async def start(self) -> WorkerInfo:
        """Listen, once all have begun to start."""
        await self._begun.wait(self._config.name)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._stepping, self._server)
        port = bind(self._server, f"{self._config.host}:0", None)
        await self._server.start()
        return WorkerInfo(
            name=self._config.name,
            role=self._config.role,
            incarnation=f"{self._config.name}-{uuid.uuid4().hex[:8]}",
            address=f"{self._config.host}:{port}",
            metrics_address="",
            pool_tokens=1 << 24,
            max_model_len=8192,
            vocab_size=VOCAB,
            architecture="Counting",
            eos_token_ids=(),
            model=ModelDigest("", "", self._tokenizer, "", "", ""),
            version=VERSION,
            pid=os.getpid(),
        )

    async def stop(self) -> None:
        """Listen no longer."""
        await self._server.stop(None)

    def begin_drain(self) -> None:
        """Wait for the requests that are here; the router sends no others."""
        self._drains.set()

    async def draining(self) -> None:
        """Return when it drains."""
        await self._drains.wait()

    async def drained(self) -> None:
        """Return when it drains, and has no request."""
        await self._drains.wait()
        while self._stepping.is_busy:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(STEP_SECONDS)
        await asyncio.sleep(STEP_SECONDS)  # its last output leaves

    async def quarantine_too_old(self) -> None:
        """Never return: it has no memory."""
        await asyncio.Event().wait()

    async def drain_if_quarantine_too_old(self) -> bool:
        """Do nothing."""
        return False

    async def failed(self) -> str:
        """Never return: nothing fails."""
        await asyncio.Event().wait()
        raise AssertionError

    async def heartbeat(self) -> None:
        """Answer at once."""

    async def peer_died(self, incarnation: str) -> None:
        """It shares nothing with others."""
