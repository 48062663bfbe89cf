"""A worker, put together: model, memory, transfers, engine and listeners."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import start_http_server
from tokenizers import Tokenizer

from kvrelay.engine.commands import Drain, GiveBack, Inbox, Inspect, PeerDied
from kvrelay.engine.computer import StepComputer
from kvrelay.engine.config import WorkerConfig, WorkerInfo
from kvrelay.engine.core import EngineCore
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.faulty import FaultyOutbox, FaultyTransferAgent
from kvrelay.engine.loading import load_model
from kvrelay.engine.loop import Engine, EngineThread, Role
from kvrelay.engine.memory import make_ledger
from kvrelay.engine.metrics import WorkerMetrics
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.service import WorkerService
from kvrelay.engine.step import ForwardThread
from kvrelay.engine.wire import SubmitRules
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.net.ends import bind, worker_server
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
QUARANTINE_LOOKS = 10
"""At the quarantine's age, in the time that it may have."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a role is built from."""

    config: WorkerConfig
    core: EngineCore
    inbox: Inbox
    agent: TransferAgent
    tokenizer: Tokenizer
    vocab_size: int


class RolePlugin(Protocol):
    """What makes a worker one of its role."""

    @property
    def role(self) -> Role:
        """What the engine runs."""
        ...

    def register(self, server: grpc.aio.Server) -> None:
        """Add the role's own services."""
        ...

    async def peer_died(self, incarnation: str) -> None:
        """Drop connections to a worker that is gone."""
        ...

    async def close(self) -> None:
        """End what the role runs on the event loop."""
        ...


class Worker:
    """One worker process's whole content, on the event loop that starts it.

    Args:
        config: what to be.
        plug_in: builds the role from the parts.
    """

    def __init__(self, config: WorkerConfig, plug_in: Callable[[WorkerParts], RolePlugin]) -> None:
        self._config = config
        self._plug_in = plug_in
        self._failure: asyncio.Future[str] | None = None
        self._draining = asyncio.Event()
        self._drained = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self.faults = FaultPlan(config.faults or ())
        """Has its effect only if the configuration names faults, or the lack of them."""

    async def start(self) -> WorkerInfo:
        """Load the model, reserve the memory, open the listeners.

        Raises:
            TokenizerError: the checkpoint's tokenizer.json is missing or broken.
            CheckpointError: the model cannot be served.
            ValueError: an option does not fit; the message begins with its name.
            OSError: a port is in use, or a file for TLS cannot be read.
        """
        config = self._config
        self._loop = loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        incarnation = f"{config.name}-{uuid.uuid4().hex[:12]}"
        # Before the weights, which take longer to read.
        tokenizer = await loop.run_in_executor(None, load_tokenizer, config.model_path)
        model = await loop.run_in_executor(None, load_model, config)
        runner, pools = model.runner, model.pools
        self._agent = await loop.run_in_executor(None, self._make_agent, incarnation, pools)
        ledger = make_ledger(config, pools, self._max_model_len(runner))
        self._assemble(ledger, model.computer, tokenizer, runner.config.vocab_size)
        rules = SubmitRules(config.role, runner.config.vocab_size, runner.config.eos_token_ids)
        port = await self._listen(WorkerService(incarnation, self._inbox, rules))
        self._metrics_server, self._metrics_thread = start_http_server(
            config.metrics_port, config.host, self._metrics.registry
        )
        self._engine.start()
        if config.quarantine_limit:
            self._watching = asyncio.create_task(self._watch_quarantine(config.quarantine_limit))
        return WorkerInfo(
            name=config.name,
            role=config.role,
            incarnation=incarnation,
            address=f"{config.host}:{port}",
            metrics_address=f"{config.host}:{self._metrics_server.server_port}",
            pool_tokens=ledger.max_lease_tokens,
            max_model_len=self._max_model_len(runner),
            vocab_size=runner.config.vocab_size,
            architecture=runner.config.architecture,
            eos_token_ids=tuple(runner.config.eos_token_ids),
            pid=os.getpid(),
        )

    async def stop(self) -> None:
        """Close the listeners, end the engine; the pool stays registered."""
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(STOP_GRACE_S)
        await self._role.close()
        await self._loop.run_in_executor(None, self._stop_threads)

    def drain(self) -> None:
        """Take no more requests; after the grace, give back what can go on elsewhere.

        For good, and once, however often it is called. The worker is still to be stopped.
        """
        if self._draining.is_set():
            return
        self._draining.set()
        self._inbox.post(Drain(lambda: self._loop.call_soon_threadsafe(self._drained.set)))
        self._loop.call_later(self._config.drain_grace, self._inbox.post, GiveBack())

    async def draining(self) -> None:
        """Wait until it drains, for whatever reason."""
        await self._draining.wait()

    async def drained(self) -> None:
        """Wait until it has drained: no request is left."""
        await self._drained.wait()

    async def failed(self) -> str:
        """Wait until one of its threads has given up, which may be never; returns the reason."""
        assert self._failure is not None, "the worker was not started"
        return await asyncio.shield(self._failure)

    async def beat(self) -> None:
        """Return once the engine's loop and the transfer agent have answered.

        A sign of life of both, also while they compute and read.
        """
        engine, agent = asyncio.Event(), asyncio.Event()
        self._inbox.post(Inspect(lambda _: self._loop.call_soon_threadsafe(engine.set)))
        self._agent.answer(lambda: self._loop.call_soon_threadsafe(agent.set))
        await engine.wait()
        await agent.wait()

    async def peer_died(self, incarnation: str) -> None:
        """The supervisor says that another worker's process is gone for good."""
        self._inbox.post(PeerDied(incarnation))
        await self._role.peer_died(incarnation)

    async def _watch_quarantine(self, limit: float) -> None:
        """Drain once memory was in quarantine for too long: what fences it will not pass."""
        while True:
            await asyncio.sleep(limit / QUARANTINE_LOOKS)
            if self._metrics.quarantine_age > limit:
                # A whole pass of the engine, which finds fences that have passed meanwhile.
                await self.beat()
                await self.beat()
            if self._metrics.quarantine_age > limit:
                logger.error("memory is in quarantine for over %g s: the worker drains", limit)
                self._metrics.count_quarantine_drain()
                self.drain()
                return

    def _stop_threads(self) -> None:
        """In the order in which they depend on each other."""
        self._engine.close()
        self._forward.close()
        self._agent.close()
        self._metrics_server.shutdown()
        self._metrics_server.server_close()
        self._metrics_thread.join()

    def _assemble(
        self, ledger: Ledger, computer: StepComputer, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        """The engine with its role, thread by thread; nothing runs yet but the forward's."""
        self._inbox = Inbox()
        self._metrics = WorkerMetrics(self._config)
        core = EngineCore(ledger, self._make_outbox(), self._metrics, self.faults)
        parts = WorkerParts(self._config, core, self._inbox, self._agent, tokenizer, vocab_size)
        self._role = self._plug_in(parts)
        self._forward = ForwardThread(computer, self._inbox.post, self._on_failure)
        engine = Engine(
            core,
            self._role.role,
            self._forward,
            overlap=self._config.overlap,
            audit_pages=self._config.audit_pages,
        )
        self._engine = EngineThread(engine, self._inbox, self._on_failure)

    def _make_agent(self, incarnation: str, pools: Sequence[KVPool]) -> TransferAgent:
        if self._config.faults is None:
            return TransferAgent(incarnation, pools, self._on_failure)
        return FaultyTransferAgent(self.faults, incarnation, pools, self._on_failure)

    def _make_outbox(self) -> Outbox:
        call_soon = self._loop.call_soon_threadsafe
        return (
            Outbox(call_soon)
            if self._config.faults is None
            else FaultyOutbox(call_soon, self.faults)
        )

    def _max_model_len(self, runner: ModelRunner) -> int:
        limit = self._config.max_model_len
        return min(limit, runner.max_model_len) if limit else runner.max_model_len

    async def _listen(self, service: WorkerService) -> int:
        self._server = worker_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, self._server)
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, self._server)
        self._role.register(self._server)
        address = f"{self._config.host}:{self._config.grpc_port}"
        port = bind(self._server, address, self._config.tls)
        await self._server.start()
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        return port

    def _on_failure(self, reason: str) -> None:
        """A thread gives up, so the worker must; called on that thread."""
        self._loop.call_soon_threadsafe(self._fail, reason)

    def _fail(self, reason: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(reason)
