"""A cluster that is supervised on a thread of its own, beside the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from prometheus_client.registry import Collector

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.cluster import Cluster, end_broken_process
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.engine.config import WorkerConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import CannotShift
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ClusterThread:
    """A `Cluster` that runs in a thread of its own: no stall of the caller's event loop delays it.

    Its lists are handed over to the caller's loop, on which all methods are to be called. Enter it
    there: all workers have then started. When the context is left, all have ended.

    Args:
        configs: one for each worker; their names differ.
        plan: says which nodes have room for which workers.
        log_level: the level of the workers' logs.
        on_progress: is called on the caller's loop; see `Cluster`.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        plan: PlacementPlan | None = None,
        log_level: int = logging.WARNING,
        on_progress: Callable[[Mapping[str, float]], None] = lambda progress: None,
    ) -> None:
        self._cluster = Cluster(
            configs,
            plan=plan,
            log_level=log_level,
            on_progress=lambda progress: self._tell(on_progress, progress),
            on_broken=end_broken_process,
        )
        # Of `Administrator`: a call is carried out on the supervisors' loop.
        self.drain = self._across(self._cluster.drain)
        self.scale = self._across(self._cluster.scale)
        self.roll = self._across(self._cluster.roll)
        self.discovery = StaticDiscovery()
        """The list of workers that the router reads."""
        self.workers: Mapping[str, WorkerInfo] = MappingProxyType({})
        """The live incarnations by worker name, as `discovery` lists them."""
        self.metrics: Collector = self._cluster.metrics.registry
        """Metrics of the workers' starts, drains and ends; any thread may read them."""

    async def __aenter__(self) -> Self:
        """Start every worker. Raises the errors of `Cluster.start`; nothing is then left."""
        self._home = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._home.create_future()
        self._ended = asyncio.Event()
        self._begun = threading.Event()
        self._supervising: asyncio.Task[None] | None = None  # and `_loop`: set by the thread
        threading.Thread(target=self._supervise_all, name="supervisors", daemon=True).start()
        self._begun.wait()
        try:
            await asyncio.shield(self._started)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    async def shift(self, successor: str) -> None:
        """Raise CannotShift: the router ends with the cluster; see `Administrator`."""
        raise CannotShift("this cluster has its router in its own process, and ends with it")

    async def state(self) -> ClusterState:
        """Return the controller's state and that of all workers that are wanted."""
        return await self.call(Cluster.state)

    def _across(self, steps_of: Callable[P, AsyncIterator[T]]) -> Callable[P, AsyncIterator[T]]:
        """Return a function for the caller's loop; the supervisors' loop makes its steps."""

        async def across(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
            steps = steps_of(*args, **kwargs)

            async def next_step() -> T | None:
                step = await anext(steps, None)
                self._hand_over()  # before the step arrives, which is a consequence
                return step

            while (step := await self._run(next_step())) is not None:
                yield step

        return across

    async def call(
        self,
        method: Callable[Concatenate[Cluster, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method or another function of the cluster, as ``call(Cluster.state)``."""
        return await self._run(method(self._cluster, *args, **kwargs))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the supervisors' loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _end(self) -> None:
        """Stop the cluster, if it runs, and wait for the thread's end."""
        if self._supervising is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended by itself
                self._loop.call_soon_threadsafe(self._supervising.cancel)
        await finished(self._ended.wait())

    # What runs on the thread.

    def _supervise_all(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException as error:
            self._tell(self._fail, error)
        finally:
            self._begun.set()
            self._tell(self._ended.set)

    async def _supervise(self) -> None:
        """Start the cluster, hand its changes over until this is cancelled, then stop it."""
        supervising = asyncio.current_task()
        assert supervising is not None
        self._loop, self._supervising = asyncio.get_running_loop(), supervising
        self._begun.set()
        async with self._cluster:
            self._hand_over()
            self._tell(self._started.set_result, None)
            while True:
                await self._cluster.discovery.changed()
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the caller's loop the workers that the cluster lists now."""
        listed = self._cluster.discovery
        endpoints, awaited = tuple(listed.endpoints()), tuple(listed.awaited())
        self._tell(self._take_over, endpoints, awaited, dict(self._cluster.workers))

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a function on the caller's loop, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(function, *args)

    # What the thread has called on the caller's loop.

    def _take_over(
        self,
        endpoints: Sequence[WorkerInfo],
        awaited: Sequence[WorkerInfo],
        workers: dict[str, WorkerInfo],
    ) -> None:
        self.workers = MappingProxyType(workers)
        self.discovery.replace(endpoints, awaited)

    def _fail(self, error: BaseException) -> None:
        """Report why the thread ends: it was cancelled, or an error has ended it."""
        if not self._started.done():
            self._started.set_exception(error)
        elif not isinstance(error, asyncio.CancelledError):
            _log.critical("the workers are no longer supervised", exc_info=error)
