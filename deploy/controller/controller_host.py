"""The Ray actor of a detached controller, which outlives the command that started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvrelay.deploy.controller.cluster import Cluster, end_broken_process
from kvrelay.deploy.controller.controller_spec import FAILED, SPEC, WHERE, ControllerSpec
from kvrelay.deploy.controller.operators.operators_listener import OperatorServices
from kvrelay.deploy.controller.records.key_value_store import KeyValueStore
from kvrelay.deploy.controller.records.ray_store import RayStore
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.logs import set_up_log
from kvrelay.deploy.nodes.on_node import address_here
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.net.addresses import host_port
from kvrelay.net.door_rules import METRICS
from kvrelay.observe.metrics_server import MetricsServer
from kvrelay.options.observing import LogFormat
from kvrelay.router.access.current_tokens import CurrentTokens
from kvrelay.router.errors import StartError

_log = logging.getLogger(__name__)
_DEPOSED: Final = 73
"""The exit status of a deposed controller; Ray takes it for a crash, and starts another process."""
_LISTEN_AGAIN_SECONDS: Final = 0.5


class Stage(StrEnum):
    """A stage in the life of a controller."""

    STARTING = "starting"
    """It starts the workers, or takes them over."""
    LEADING = "leading"
    """It listens, and all workers are there or on their way."""
    FAILED = "failed"
    """The first workers did not start, and none of their processes is left."""
    STOPPED = "stopped"
    """It has ended all workers."""


@dataclass(frozen=True, slots=True)
class ControllerReport:
    """A controller's report to the commands that start and stop it."""

    stage: Stage
    pid: int
    address: str = ""
    """The address at which it listens."""
    metrics_address: str = ""
    """The address at which Prometheus reads its metrics."""
    reason: str = ""
    """The reason why it has failed."""
    progress: Mapping[str, float] = field(default_factory=dict)
    """The share of its weights that each worker has read, at the first start."""


class ControllerHost:
    """The host of a cluster's controller, which it runs on a thread from its process's start.

    Ray calls no method when it restarts a process, so the constructor does everything. A method may
    be called again if the process has died meanwhile.

    Args:
        namespace: Ray's namespace of the cluster's store and actors.
        log_level: the level of the controller's log.
        log_format: the format of the controller's log.
    """

    def __init__(
        self, namespace: str, log_level: int, log_format: LogFormat = LogFormat.TEXT
    ) -> None:
        set_up_log(log_level, log_format, role="controller", cluster=namespace.rpartition("/")[2])
        self._namespace = namespace
        self._report = ControllerReport(Stage.STARTING, os.getpid())
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        threading.Thread(target=self._lead_until_stopped, name="controller", daemon=True).start()

    def __repr__(self) -> str:
        """Return what Ray prints before each line of the controller's log."""
        return "controller"

    async def report(self) -> ControllerReport:
        """Return the controller's stage, addresses and progress."""
        return self._report

    async def stop(self) -> None:
        """Begin to end all workers; the report says when it is done."""
        self._loop.call_soon_threadsafe(self._stop.set)

    async def process(self) -> ProcessIdentity | None:
        """Return this process's identity on its machine; None where the system does not tell it."""
        return ProcessIdentity.of_this_process()

    def make_store(self) -> KeyValueStore:
        """Make the cluster's store."""
        return RayStore.of_this_process(self._namespace)

    def _lead_until_stopped(self) -> None:
        """Lead on the thread; an unexpected error ends the process, and the next one goes on."""
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._lead())
        except BaseException:
            _log.critical("the controller ends", exc_info=True)
            end_broken_process()

    async def _lead(self) -> None:
        store = self.make_store()
        spec = await store.get(SPEC)
        failed = await store.get(FAILED)
        if spec is None or failed is not None:
            self._say(Stage.FAILED, reason=(failed or b"it was ended").decode())
            return
        try:
            read = ControllerSpec.from_bytes(spec)
        except ClusterError as error:  # the next process would find the same
            _log.critical("%s", error)
            self._say(Stage.FAILED, reason=str(error))
            return
        await self._lead_workers(store, read)

    async def _lead_workers(self, store: KeyValueStore, spec: ControllerSpec) -> None:
        cluster = Cluster(
            spec.configs,
            plan=spec.plan,
            log_level=spec.log_level,
            on_progress=lambda progress: self._say(Stage.STARTING, progress=progress),
            store=store,
            on_deposed=_end_deposed,
            on_broken=end_broken_process,
        )
        try:
            if not await self._started_before_stop(cluster):
                self._say(Stage.STOPPED)
                return
            async with contextlib.AsyncExitStack() as undo:
                address, metrics = await self._listen(undo, spec, cluster)
                await store.put(WHERE, address.encode())
                self._say(Stage.LEADING, address=address, metrics_address=metrics)
                await self._stop.wait()
        except (ClusterError, StartError) as error:
            if cluster.took_over:
                raise
            await cluster.stop()
            await store.put(FAILED, str(error).encode())
            self._say(Stage.FAILED, reason=str(error))
            return
        await cluster.stop()
        self._say(Stage.STOPPED)

    async def _started_before_stop(self, cluster: Cluster) -> bool:
        """Start the cluster; return False, with the cluster stopped, if it is to stop meanwhile."""
        starting = asyncio.create_task(cluster.start())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return True
            starting.cancel()
            await asyncio.wait({starting})
            await cluster.stop()
            return False
        finally:
            stopping.cancel()

    async def _listen(
        self, undo: contextlib.AsyncExitStack, spec: ControllerSpec, cluster: Cluster
    ) -> tuple[str, str]:
        """Serve operators, routers and Prometheus; return the two addresses.

        A port may be in use until a predecessor has ended.
        """
        while True:
            try:
                async with contextlib.AsyncExitStack() as listeners:
                    addresses = await _serve(listeners, spec, cluster)
                    undo.push_async_callback(listeners.pop_all().aclose)
                    return addresses
            except StartError as error:
                if not cluster.took_over:
                    raise
                _log.error("%s", error)
                await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    def _say(
        self,
        stage: Stage,
        *,
        address: str = "",
        metrics_address: str = "",
        reason: str = "",
        progress: Mapping[str, float] | None = None,
    ) -> None:
        self._report = ControllerReport(
            stage, os.getpid(), address, metrics_address, reason, progress or {}
        )


async def _serve(
    undo: contextlib.AsyncExitStack, spec: ControllerSpec, cluster: Cluster
) -> tuple[str, str]:
    """Listen for operators, routers and Prometheus; return the two addresses. Raises StartError."""
    tokens = None
    if spec.auth_token_file is not None:
        tokens = _tokens(spec.auth_token_file)
        following = asyncio.create_task(tokens.follow())
        undo.callback(following.cancel)
    host = address_here(spec.advertised)
    services = OperatorServices(cluster, cluster.discovery, spec.cluster_name)
    address = await services.serve(undo, host_port(host, spec.port), spec.tls, tokens)
    where = spec.metrics_host or host
    try:
        registry = cluster.metrics.registry
        server = MetricsServer(registry, where, spec.metrics_port, METRICS, services.pages)
    except OSError as error:
        raise StartError(f"--metrics: {host_port(where, spec.metrics_port)}: {error}") from error
    undo.push_async_callback(asyncio.to_thread, server.close)
    return address, host_port(where, server.port)


def _tokens(path: Path) -> CurrentTokens:
    try:
        return CurrentTokens(path)
    except ValueError as error:
        raise StartError(f"--auth-token-file: {error}") from error


def _end_deposed() -> None:
    _log.critical("another controller has taken over, so the process ends")
    logging.shutdown()
    os._exit(_DEPOSED)
