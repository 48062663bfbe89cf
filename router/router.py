"""The router, which builds, starts and stops the services, the fleet and the live requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from grpc_health.v1 import health, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from tokenizers import Tokenizer

from kvrelay.net.allocator import return_large_blocks
from kvrelay.net.channels import front_server, worker_credentials
from kvrelay.net.door_rules import GRPC, METRICS
from kvrelay.net.health_service import HealthService
from kvrelay.net.reflection import enable_reflection
from kvrelay.net.tls import CurrentTls, TlsFileError, TlsFiles
from kvrelay.observe.metrics_server import MetricsServer
from kvrelay.observe.otlp import Fate, OtlpExporter, SpanCollector
from kvrelay.router.access.auth import Guard, name_caller
from kvrelay.router.access.current_tokens import CurrentTokens
from kvrelay.router.access.token_file import Tokens
from kvrelay.router.admission.admission import Admission
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.admission.session_adoption import SessionAdoption
from kvrelay.router.admission.structured_outputs import StructuredOutputs
from kvrelay.router.admission.tokenizer_threads import TextThreads
from kvrelay.router.config import MetricNames, PlacementMode, RouterConfig
from kvrelay.router.discovery import Discovery
from kvrelay.router.doors.grpc_service import InferenceService
from kvrelay.router.doors.http.http_door import Behind, make_app
from kvrelay.router.doors.http.http_listener import ConnectionBounds, HttpListener
from kvrelay.router.doors.listening import STOP_GRACE_SECONDS, host_and_port, listen
from kvrelay.router.doors.raw_requests import RawMessages
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.router.errors import StartError
from kvrelay.router.metrics import (
    EXPECTED_HIT_TOKENS,
    HTTP_CONNECTIONS,
    LIVE_REQUESTS,
    PREFIX_ENTRIES,
    REFUSED_WORKERS,
    SESSIONS,
    SPANS,
    STALE_OUTPUTS,
    WAITING_FOR_WORKERS,
    RouterMetrics,
)
from kvrelay.router.placement.choose import PlacementRules
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.requests.request_trace import Tracing
from kvrelay.router.sessions import Sessions
from kvrelay.router.vllm_names import VllmNames
from kvrelay.text.chat_template import ChatTemplate, TemplateError, load_chat_template
from kvrelay.text.token_bytes import leaves_bytes_encoded, longest_token_bytes
from kvrelay.text.tokenizer import LoadedTokenizer, TokenizerError, load_tokenizer
from kvrelay.v1 import (
    inference_pb2,
    inference_pb2_grpc,
)
from kvrelay.wire.load import WorkerLoad
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_GENERATE = f"/{_SERVICE}/Generate"
_RAW = RawMessages({_GENERATE, f"/{_SERVICE}/Detokenize"}, answered={_GENERATE})

_LEAST_STREAMS = 1024
logger = logging.getLogger(__name__)


class OperatorDoor(Protocol):
    """Services for operators and other routers, served by whoever supervises the workers."""

    pages: Mapping[str, Callable[[str], bytes]]
    """Pages to serve beside the router's metrics, by path."""

    async def serve(
        self,
        undo: contextlib.AsyncExitStack,
        address: str,
        tls: TlsFiles | None,
        tokens: Callable[[], Tokens] | None,
        requests_of: Callable[[str], int | None],
    ) -> str:
        """Listen until `undo`, and return the address with its real port.

        Args:
            undo: stops it.
            address: ``host:port`` to listen on.
            tls: the certificate to show.
            tokens: returns the tokens that are valid now; None: no call needs one.
            requests_of: counts the requests of a worker's incarnation.

        Raises:
            StartError: it cannot listen there.
        """
        ...


class Router:
    """A router of requests from gRPC and HTTP to the workers that discovery lists.

    Call `start` and `stop` once each, on one event loop. Routers share nothing.

    Args:
        config: its addresses, bounds and files.
        discovery: lists the workers.
        operators: the door for operators and other routers; None: there is none here.
        collectors: further metrics to serve beside the router's own.
    """

    def __init__(
        self,
        config: RouterConfig,
        discovery: Discovery,
        operators: OperatorDoor | None = None,
        collectors: Sequence[Collector] = (),
    ) -> None:
        self._config = config
        self._operators = operators
        self._discovery = discovery
        self._id = uuid.uuid4().hex
        self._metrics = RouterMetrics(config.model_name)
        self._collectors = (self._metrics.registry, *collectors)
        self._fleet = Fleet(
            discovery,
            self._make_link,
            KnownPrefixes(config.prefix_index_entries),
            PlacementRules(
                decodes_alone=config.placement is PlacementMode.ADAPTIVE,
                targets=config.latency_targets,
                deadline_margin=config.deadline_margin,
            ),
        )
        self._sessions = Sessions(config, self._metrics, self._fleet.forget_session)
        self._adoption = SessionAdoption(self._sessions, self._fleet, self._metrics)
        self._health = HealthService((_SERVICE,))
        self._undo = contextlib.AsyncExitStack()
        self._live: LiveRequests | None = None
        self._http: HttpListener | None = None
        self._worker_credentials: CurrentTls | None = None
        self._tokens: CurrentTokens | None = None
        self.grpc_address = config.grpc_address
        """The address where clients connect; with the real port once started."""
        self.http_address = config.http_address
        """The address where clients of OpenAI's API connect; with the real port once started."""
        self.metrics_address = config.metrics_address
        """The address where Prometheus reads; with the real port once started."""
        self.admin_address: str | None = None
        """The address where operators connect, once started; None without a door for them."""

    async def start(self) -> None:
        """Listen, and begin to attach to workers; undo everything if it fails.

        Raises:
            StartError: the start failed; the message is one line.
        """
        return_large_blocks()
        self._read_credentials()
        async with contextlib.AsyncExitStack() as undo:
            loaded = await asyncio.to_thread(_load_tokenizer, self._config.model_path)
            self._fleet.model.tokenizer, tokenizer = loaded.sha256, loaded.tokenizer
            live = LiveRequests(self._config, self._fleet, tokenizer, self._metrics)
            self._live, self._on_killed = live, live.on_killed
            self._metrics.watch(LIVE_REQUESTS, lambda: live.count(streaming=False), state="waiting")
            self._metrics.watch(
                LIVE_REQUESTS, lambda: live.count(streaming=True), state="streaming"
            )
            self._metrics.watch(WAITING_FOR_WORKERS, lambda: live.waiting_for_workers)
            self._metrics.watch(REFUSED_WORKERS, lambda: len(self._fleet.model.refusals))
            self._metrics.watch(PREFIX_ENTRIES, lambda: self._fleet.prefixes.num_entries)
            if self._config.metric_names is MetricNames.VLLM:
                names = VllmNames(self._config.model_name, self._metrics, self._loads)
                self._metrics.registry.register(names)
            self._serve_metrics(undo)
            _run_in(undo, self._fleet.run())
            if self._tokens is not None:
                _run_in(undo, self._tokens.follow())
            if self._operators is not None:
                self.admin_address = await self._operators.serve(
                    undo,
                    str(self._config.admin_address),
                    self._config.admin_tls,
                    self._tokens,
                    self._requests_of,
                )
            texts = await self._make_texts(undo, tokenizer)
            self._serve_sessions(undo)
            structured = StructuredOutputs(
                tokenizer, self._fleet, self._metrics, self._config.retry_after_ms
            )
            undo.callback(structured.close)
            tracing = Tracing(
                self._exporter(undo), self._config.trace_sample, self._config.model_name
            )
            admission = Admission(
                self._config,
                self._fleet,
                live,
                texts,
                self._metrics,
                self._seeds,
                structured,
                self._sessions,
                tracing,
            )
            info = ServerInfo(self._fleet, live, self._metrics, self._sessions)
            await self._serve_clients(undo, live, admission, texts, info)
            if self._config.http_address is not None:
                await self._serve_http(undo, self._config.http_address, admission, texts, info)
            undo.push_async_callback(live.close, self._config.shutdown_grace_seconds)
            _run_in(undo, self._report_health())
            undo.callback(self._health.close)
            self._undo = undo.pop_all()

    def _serve_sessions(self, undo: contextlib.AsyncExitStack) -> None:
        self._metrics.watch(SESSIONS, lambda: len(self._sessions))
        _run_in(undo, self._sessions.run())

    def _exporter(self, undo: contextlib.AsyncExitStack) -> OtlpExporter | None:
        """The exporter of this router's spans; None: no request is traced."""
        if self._config.otlp is None:
            return None
        for fate in Fate:
            self._metrics.show(SPANS, fate=fate.value)
        exporter = OtlpExporter(
            SpanCollector.parse(self._config.otlp),
            {
                "service.name": "kvrelay-router",
                "service.version": VERSION,
                "service.instance.id": self._id,
                "process.pid": os.getpid(),
            },
            lambda fate, spans: self._metrics.count(SPANS, spans, fate=fate.value),
        )
        undo.push_async_callback(asyncio.to_thread, exporter.close)
        return exporter

    def _loads(self) -> list[tuple[WorkerRole, WorkerLoad]]:
        return [(link.endpoint.role, link.load) for link in self._fleet.links]

    async def wait_ready(self) -> None:
        """Return once a prefill and a decode worker, or an aggregated one, are attached.

        Raises:
            StartError: workers have loaded different models, or the router another tokenizer.
        """
        while True:
            if refusals := self._fleet.model.refusals:
                raise StartError("; ".join(refusals))
            if self._fleet.ready:
                return
            await self._fleet.changes.wait()

    async def drain(self) -> None:
        """Be ready no more, and return once no request lives or after `drain_seconds`.

        New requests are still served, since load balancers need a while to see that the router is
        not ready. But each HTTP answer closes its connection, so that clients connect elsewhere.
        """
        self._health.close()
        if self._http is not None:
            self._http.close_after_answers()
        if self._live is not None:
            await self._live.drain(self._config.drain_seconds)

    async def stop(self) -> None:
        """Refuse new requests, let live ones finish or fail them, then close everything."""
        await self._undo.aclose()

    def _read_credentials(self) -> None:
        """Read the certificate for workers, the tokens that clients must send, and the seed key."""
        path = self._config.auth_token_file
        try:
            self._worker_credentials = worker_credentials(self._config.worker_tls)
            self._tokens = None if path is None else CurrentTokens(path)
        except OSError as error:
            raise StartError(f"TLS: {error}") from error
        except ValueError as error:
            raise StartError(f"--auth-token-file: {error}") from error
        try:
            self._seeds = Seeds.of_file(self._config.seed_key_file)
        except ValueError as error:
            raise StartError(f"--seed-key-file: {error}") from error

    async def _make_texts(self, undo: contextlib.AsyncExitStack, tokenizer: Tokenizer) -> Texts:
        threads = TextThreads(self._config.max_text_bytes, self._config.retry_after_ms)
        undo.callback(threads.close)
        longest = await asyncio.to_thread(longest_token_bytes, tokenizer)
        if await asyncio.to_thread(leaves_bytes_encoded, tokenizer):
            logger.warning(
                "tokenizer.json has no ByteLevel decoder beside its ByteLevel pre-tokenizer: texts "
                "will show letters such as Ġ for spaces, and structured output is refused"
            )
        return Texts(tokenizer, longest, threads)

    async def _serve_clients(
        self,
        undo: contextlib.AsyncExitStack,
        live: LiveRequests,
        admission: Admission,
        texts: Texts,
        info: ServerInfo,
    ) -> None:
        # The validator refuses messages of up to twice the limit, and names the field.
        # gRPC refuses larger ones, with RESOURCE_EXHAUSTED.
        bytes_taken = 2 * self._config.max_message_bytes
        server = front_server(
            replace(GRPC, most_streams=_streams(self._config.max_live_requests)),
            bytes_taken,
            guards=[Guard(self._tokens, GRPC)],
            caller_of=name_caller,
            inner=[_RAW],
        )
        service = InferenceService(
            self._config,
            self._fleet,
            live,
            admission,
            texts,
            self._metrics,
            info,
            self._sessions,
            self._adoption,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        enable_reflection([_SERVICE, health.SERVICE_NAME], server)
        config = self._config
        self.grpc_address = await listen(
            undo, server, config.grpc_address, config.front_tls, "gRPC"
        )

    async def _serve_http(
        self,
        undo: contextlib.AsyncExitStack,
        address: str,
        admission: Admission,
        texts: Texts,
        info: ServerInfo,
    ) -> None:
        template = await asyncio.to_thread(_load_template, self._config)
        behind = Behind(
            self._config,
            self._fleet,
            admission,
            texts,
            self._metrics,
            template,
            info,
            self._sessions,
            self._adoption,
            self._tokens,
        )
        host, port = host_and_port(address)
        bounds = ConnectionBounds(
            2 * self._config.max_message_bytes,
            self._config.read_timeout,
            self._config.http_keep_alive,
        )
        tls = self._config.front_tls
        try:
            listener = HttpListener(make_app(behind), host.strip("[]"), port, tls, bounds)
        except TlsFileError as error:
            raise StartError(f"TLS: {error}") from error
        except OSError as error:
            raise StartError(f"HTTP: cannot listen on {address}: is the port in use?") from error
        undo.push_async_callback(listener.stop, STOP_GRACE_SECONDS)
        await listener.start()
        self._http = listener
        self._metrics.watch(HTTP_CONNECTIONS, lambda: listener.num_connections)
        self.http_address = f"{host}:{listener.port}"

    def _requests_of(self, incarnation: str) -> int | None:
        """The number of requests that a worker reports."""
        for link in self._fleet.links:
            if link.endpoint.incarnation == incarnation:
                return link.load.waiting_requests + link.load.running_requests
        return 0

    def _serve_metrics(self, undo: contextlib.AsyncExitStack) -> None:
        host, port = host_and_port(self._config.metrics_address)
        registry = CollectorRegistry(auto_describe=True)  # for ?name[]=
        for collector in self._collectors:
            registry.register(collector)
        pages = {} if self._operators is None else self._operators.pages
        try:
            server = MetricsServer(registry, host.strip("[]"), port, METRICS, pages)
        except OSError as error:
            address = self._config.metrics_address
            raise StartError(f"metrics: cannot listen on {address}: is the port in use?") from error
        undo.push_async_callback(asyncio.to_thread, server.close)
        self.metrics_address = f"{host}:{server.port}"

    async def _report_health(self) -> None:
        while True:
            self._health.set(serving=self._fleet.ready)
            await self._fleet.changes.wait()

    def _make_link(
        self, endpoint: WorkerInfo, on_change: Callable[[WorkerLink], None]
    ) -> WorkerLink:
        return WorkerLink(
            endpoint,
            router_id=self._id,
            credentials=self._worker_credentials,
            # A submission is a client's message with every default filled in.
            max_message_bytes=4 * self._config.max_message_bytes,
            on_change=on_change,
            on_stale=lambda: self._metrics.count(STALE_OUTPUTS),
            on_killed=self._on_killed,
            prefixes=self._fleet.prefixes,
            on_ended_sessions=self._sessions.worker_gave_up,
            on_detached=self._sessions.worker_lost,
            on_expected_hit=lambda role, tokens: self._metrics.count(
                EXPECTED_HIT_TOKENS, tokens, role=role
            ),
        )


def _run_in(undo: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in the background; `undo` cancels it."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    undo.push_async_callback(end)


def _streams(max_live_requests: int) -> int:
    """The most calls of one connection, so that one client can have all live requests, and more."""
    return max(_LEAST_STREAMS, 2 * max_live_requests)


def _load_tokenizer(model_path: Path) -> LoadedTokenizer:
    try:
        return load_tokenizer(model_path)
    except TokenizerError as error:
        raise StartError(str(error)) from error


def _load_template(config: RouterConfig) -> ChatTemplate | None:
    try:
        return load_chat_template(config.model_path, config.chat_template)
    except TemplateError as error:
        raise StartError(f"the chat template: {error}") from error
