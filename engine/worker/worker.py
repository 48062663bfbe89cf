"""One worker on its event loop: its start, drain and stop, and the failures of its threads."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from grpc_health.v1 import health_pb2_grpc

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.scheduler.commands import Drain, GiveUp, Inspect, PeerDied, RetractForDrain
from kvrelay.engine.scheduler.metrics import (
    FAILED_STEPS,
    QUARANTINE_DRAINS,
    SPANS,
    WorkerMetrics,
)
from kvrelay.engine.worker.assembly import MakePlugin, assemble, make_agent
from kvrelay.engine.worker.black_box import BlackBox
from kvrelay.engine.worker.device_defaults import with_device_defaults
from kvrelay.engine.worker.kv_events import KVEvents
from kvrelay.engine.worker.loading import LoadedModel, load_model
from kvrelay.engine.worker.submit_rules import SubmitRules
from kvrelay.engine.worker.weights_read import WeightsRead, weight_bytes
from kvrelay.engine.worker.worker_lease import WorkerLease, lease_clock
from kvrelay.engine.worker.worker_service import WorkerService
from kvrelay.net.addresses import host_port
from kvrelay.net.channels import bind, worker_server
from kvrelay.net.door_rules import METRICS
from kvrelay.net.health_service import HealthService
from kvrelay.observe.metrics_server import MetricsServer
from kvrelay.observe.otlp import Fate, OtlpExporter, SpanCollector
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
SECOND_LOOK_S = 1.0
LAST_WORDS_S = 0.5
"""Seconds for streams to end after the engine has; those of routers end by themselves."""


class Worker:
    """The whole content of one worker process, on the event loop that starts it.

    Args:
        config: the worker's.
        make_plugin: builds what the worker's role needs from the other parts.
    """

    def __init__(self, config: WorkerConfig, make_plugin: MakePlugin) -> None:
        self._config = config
        self._make_plugin = make_plugin
        self._failure: asyncio.Future[str] | None = None
        self._draining = asyncio.Event()
        self._drained = asyncio.Event()
        self._weights_read = WeightsRead(weight_bytes(config))
        self._black_box: BlackBox | None = None
        self._kv_events: KVEvents | None = None
        self._spans: OtlpExporter | None = None
        self._kv_events_address = ""
        self.faults = FaultPlan(config.faults or ())
        """The faults; they take effect only if the configuration names some, or has an empty
        tuple."""
        self.lease = WorkerLease(lease_clock(suspended_alone=config.suspended_alone))
        """The lease, checked before bytes may move; the worker's supervisor begins it."""

    async def start(self) -> WorkerInfo:
        """Load the model, reserve the memory, open the listeners.

        Raises:
            TokenizerError: the checkpoint's tokenizer.json is missing or broken.
            CheckpointError: the model cannot be served.
            ValueError: an option does not fit; the message begins with its name.
            OSError: a port is in use, or a file for TLS cannot be read.
        """
        self._loop = loop = asyncio.get_running_loop()
        config = await loop.run_in_executor(None, with_device_defaults, self._config)
        self._config = config
        self._failure = loop.create_future()
        incarnation = f"{config.name}-{uuid.uuid4().hex[:12]}"
        # Before the weights, which take longer to read.
        tokenizer = await loop.run_in_executor(None, load_tokenizer, config.model_path)
        model = await self._load(tokenizer.sha256)
        agent = await loop.run_in_executor(
            None,
            make_agent,
            config,
            incarnation,
            model,
            self.faults,
            self._on_failure,
            self.lease.check,
        )
        if config.black_box is not None:
            # After UCX, which has handlers of fatal signals of its own.
            self._black_box = BlackBox(config.black_box)
        await self._publish_kv_events(loop)
        self._parts = assemble(
            config,
            model,
            agent,
            tokenizer.tokenizer,
            self._make_plugin,
            faults=self.faults,
            black_box=self._black_box,
            call_soon=loop.call_soon_threadsafe,
            on_failure=self._on_failure,
            page_listener=self._kv_events,
        )
        self._spans = _exporter(config, incarnation, self._parts.metrics)
        port = await self._listen(incarnation, model)
        registry = self._parts.metrics.registry
        self._metrics_server = MetricsServer(
            registry, config.metrics_host, config.metrics_port, METRICS
        )
        self._parts.engine.start()
        self._quarantine = QuarantineLimit(
            self._parts.metrics, config.quarantine_limit, self.heartbeat
        )
        return self._describe(incarnation, port, model)

    async def _load(self, tokenizer_sha256: str) -> LoadedModel:
        """Load the model on a thread that then ends, together with its OpenMP team.

        If that team stayed, the process would have more OpenMP threads than cores. Then no team
        spins while it waits for work, and each small operation of a forward first wakes its team.
        """
        thread = ThreadPoolExecutor(1, "load")
        try:
            return await self._loop.run_in_executor(
                thread, load_model, self._config, tokenizer_sha256, self._weights_read.add
            )
        finally:
            thread.shutdown(wait=False)

    async def stop(self) -> None:
        """Close the listeners, and end the engine; the pool stays registered."""
        await self._server.stop(STOP_GRACE_S)
        if self._kv_events is not None:
            await self._kv_events.close()
        await self._parts.plugin.close()
        await self._loop.run_in_executor(None, self._stop_threads)
        if self._black_box is not None:
            self._black_box.close()

    @property
    def weights_read(self) -> float:
        """The share of its weights that it has read, from 0 to 1."""
        return self._weights_read.share

    def begin_drain(self) -> None:
        """Take no more requests; after the grace, retract those that can go on elsewhere.

        A drain cannot be undone, and further calls change nothing. The worker must still be
        stopped.
        """
        if self._draining.is_set():
            return
        self._draining.set()
        post = self._parts.inbox.post
        post(Drain(lambda: self._loop.call_soon_threadsafe(self._drained.set)))
        self._service.retract_held()
        self._loop.call_later(self._config.drain_grace, post, RetractForDrain())

    async def quarantine_too_old(self) -> None:
        """Wait until memory is in quarantine for too long, so that the worker should drain."""
        await self._quarantine.exceeded()

    async def drain_if_quarantine_too_old(self) -> bool:
        """Begin to drain if memory is still in quarantine for too long. Returns whether it is."""
        if not await self._quarantine.is_exceeded():
            return False
        limit = self._config.quarantine_limit
        logger.error("memory is in quarantine for over %g s, so the worker drains", limit)
        self._parts.metrics.count(QUARANTINE_DRAINS)
        self.begin_drain()
        return True

    async def draining(self) -> None:
        """Wait until the worker drains, for whatever reason."""
        await self._draining.wait()

    async def drained(self) -> None:
        """Wait until the worker has drained: no request is left."""
        await self._drained.wait()

    async def failed(self) -> str:
        """Wait until one of its threads has failed, which may be never. Returns the reason.

        By then the routers have received the engine's last outputs.
        """
        assert self._failure is not None, "the worker was not started"
        reason = await asyncio.shield(self._failure)
        self._service.close()
        await self._server.stop(LAST_WORDS_S)
        return reason

    async def heartbeat(self) -> None:
        """Return once the engine's loop and the transfer agent, if there is one, have answered.

        Both answer while they compute and read, so no answer means that one hangs. A forward,
        or hashing, that takes longer than `--step-timeout` allows ends the worker.
        """
        engine, agent = asyncio.Event(), asyncio.Event()
        self._parts.inbox.post(Inspect(lambda _: self._loop.call_soon_threadsafe(engine.set)))
        if self._parts.agent is None:
            agent.set()
        else:
            self._parts.agent.report_alive(lambda: self._loop.call_soon_threadsafe(agent.set))
        await engine.wait()
        await agent.wait()
        if (hang := await self._hang()) is not None:
            self._parts.inbox.post(hang)
            await asyncio.Event().wait()  # not a sign of life

    async def _hang(self) -> GiveUp | None:
        """Find work that takes too long, also at a second look. Returns what to do, or None.

        The second look is for a process that was stopped for a while: its work is old by the clock.
        """
        if self._parts.hang(self._config) is None:
            return None
        await asyncio.sleep(min(SECOND_LOOK_S, self._config.worker_timeout / 4))
        return self._parts.hang(self._config)

    async def peer_died(self, incarnation: str) -> None:
        """Take the supervisor's message that another worker's process is gone for good.

        Connections to it end first, so that their messages are in the inbox before the death.
        """
        try:
            await self._parts.plugin.peer_died(incarnation)
        finally:
            self._parts.inbox.post(PeerDied(incarnation))

    def _stop_threads(self) -> None:
        self._parts.stop_threads()
        if self._spans is not None:
            self._spans.close()
        self._metrics_server.close()

    async def _publish_kv_events(self, loop: asyncio.AbstractEventLoop) -> None:
        config = self._config
        if config.kv_events:
            medium = "CPU" if config.device == "cpu" else "GPU"
            self._kv_events = KVEvents(config.page_size, medium, loop.call_soon_threadsafe)
            port = await self._kv_events.start(config.host)
            self._kv_events_address = host_port(config.host, port)

    async def _listen(self, incarnation: str, model: LoadedModel) -> int:
        """Serve routers, peers and health checks. Returns the port."""
        config, checkpoint = self._config, model.runner.config
        rules = SubmitRules(config.role, checkpoint.vocab_size, checkpoint.eos_token_ids)
        killed = self._black_box.killed if self._black_box is not None else ()
        self._parts.metrics.count(FAILED_STEPS, bool(killed))
        self._service = WorkerService(
            incarnation, self._parts.inbox, rules, killed, model.grammars.prepare, self._spans
        )
        self._server = worker_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._service, self._server)
        healthy = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, self._server)
        self._parts.plugin.register(self._server)
        port = bind(self._server, host_port(config.host, config.grpc_port), config.tls)
        await self._server.start()
        healthy.set(serving=True)
        return port

    def _describe(self, incarnation: str, port: int, model: LoadedModel) -> WorkerInfo:
        config, checkpoint = self._config, model.runner.config
        return WorkerInfo(
            name=config.name,
            role=config.role,
            incarnation=incarnation,
            address=host_port(config.host, port),
            metrics_address=host_port(config.metrics_host, self._metrics_server.port),
            kv_events_address=self._kv_events_address,
            pool_tokens=self._parts.kv_cache.max_lease_tokens,
            max_model_len=model.max_model_len,
            vocab_size=checkpoint.vocab_size,
            architecture=checkpoint.architecture,
            eos_token_ids=tuple(checkpoint.eos_token_ids),
            model=model.digest,
            version=VERSION,
            pid=os.getpid(),
            locality=config.locality,
        )

    def _on_failure(self, reason: str) -> None:
        """End the worker because one of its threads has failed; called on that thread."""
        self._loop.call_soon_threadsafe(self._fail, reason)

    def _fail(self, reason: str) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_result(reason)


def _exporter(
    config: WorkerConfig, incarnation: str, metrics: WorkerMetrics
) -> OtlpExporter | None:
    """Make the exporter of this worker's spans; None: no request is traced."""
    if config.otlp is None:
        return None
    for fate in Fate:
        metrics.show(SPANS, fate=fate.value)
    return OtlpExporter(
        SpanCollector.parse(config.otlp),
        {
            "service.name": f"kvrelay-{config.role}",
            "service.version": VERSION,
            "service.instance.id": incarnation,
            "kvrelay.worker": config.name,
            "process.pid": os.getpid(),
        },
        lambda fate, spans: metrics.count(SPANS, spans, fate=fate.value),
    )


_LOOKS = 10
"""How often the quarantine's age is checked within the limit."""


class QuarantineLimit:
    """The longest time that memory may be in quarantine.

    A fence that has not passed for so long will not pass, so the memory is lost until the worker is
    restarted.

    Args:
        metrics: knows the age of the quarantine, as of the engine's latest pass.
        seconds: the longest time in quarantine; 0: no limit.
        run_a_pass: returns after the engine has run a whole pass, or a part of one.
    """

    def __init__(
        self, metrics: WorkerMetrics, seconds: float, run_a_pass: Callable[[], Awaitable[None]]
    ) -> None:
        self._metrics = metrics
        self._seconds = seconds
        self._run_a_pass = run_a_pass

    async def exceeded(self) -> None:
        """Wait until memory is in quarantine for too long, which may be never."""
        if not self._seconds:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._seconds / _LOOKS)
            if await self.is_exceeded():
                return

    async def is_exceeded(self) -> bool:
        """Whether memory is in quarantine for too long now."""
        if self._metrics.quarantine_age > self._seconds:
            # The first pass may be a part of one; the second is whole and finds passed fences.
            await self._run_a_pass()
            await self._run_a_pass()
        return self._metrics.quarantine_age > self._seconds
