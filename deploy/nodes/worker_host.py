"""The Ray actor in whose process a worker runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol

from kvrelay.deploy.logs import add_to_log, set_up_log
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.numa import NumaHome, keep_to_one_node
from kvrelay.deploy.nodes.on_node import on_this_node
from kvrelay.deploy.nodes.started_worker import Started
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.deploy.nodes.worker_process import ProcessIdentity, WorkerProcess
from kvrelay.deploy.stop_signals import TermSignal
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.faults import Fault, FaultPlan
from kvrelay.engine.worker.worker_lease import Renewal, WorkerLease
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)
_ENGINE_DIED: Final = 70
_DRAINED: Final = 71
_LEASE_RAN_OUT: Final = 72
"""The process's exit statuses; Ray takes them for a crash, and starts another process."""
_LAST_WORD_SECONDS: Final = 2.0
"""The time in which the controller can hear why the process is about to end: it counts the causes.
"""
_LAST_LINE_SECONDS: Final = 0.5
"""The time in which the last log line can be written."""


class HostedWorker(Protocol):
    """A role's worker, as its `build` returns it."""

    async def start(self) -> WorkerInfo:
        """Load the model, reserve the memory, listen."""

    async def stop(self) -> None:
        """End every request and free everything."""

    def begin_drain(self) -> None:
        """Take no more requests; finish the present ones, or let other workers take them over."""

    async def draining(self) -> None:
        """Return when the worker drains, for any reason."""

    async def quarantine_too_old(self) -> None:
        """Return when memory has been in quarantine for too long; until then, wait."""

    async def drain_if_quarantine_too_old(self) -> bool:
        """Begin to drain if memory is in quarantine for too long; return whether it is."""

    async def drained(self) -> None:
        """Return when the worker has drained: no request is left."""

    async def failed(self) -> str:
        """Return the reason when the engine has died; until then, wait."""

    async def heartbeat(self) -> None:
        """Return when the engine's loop and the transfer agent have answered."""

    async def peer_died(self, incarnation: str) -> None:
        """Note, perhaps for the second time, that another worker's process has ended."""

    @property
    def weights_read(self) -> float:
        """The share of its weights that it has read, from 0 to 1."""

    @property
    def lease(self) -> WorkerLease:
        """The worker's lease, without which it must not serve; not begun yet."""

    @property
    def faults(self) -> FaultPlan:
        """The faults that are injected into it."""


BuildWorker = Callable[[WorkerConfig], HostedWorker]


def _build_worker(config: WorkerConfig) -> HostedWorker:
    """Build a worker of any role.

    A role's room is imported here, in the worker's process: the process that starts the cluster
    needs none of them.
    """
    match config.role:
        case WorkerRole.PREFILL:
            from kvrelay.prefill_worker.worker import build
        case WorkerRole.DECODE:
            from kvrelay.decode_worker.worker import build
        case WorkerRole.AGGREGATED:
            from kvrelay.aggregated_worker.worker import build
    return build(config)


BUILDERS: Final[dict[WorkerRole, BuildWorker]] = dict.fromkeys(WorkerRole, _build_worker)
"""The function that builds a role's worker, which is not started yet."""


class WorkerHost:
    """The host of one worker. Ray makes a new one, in a new process, whenever one dies.

    Args:
        config: the worker's configuration.
        build: makes the worker.
        log_level: the level of the process's log, which goes to its standard error.
    """

    sigterm: ClassVar[TermSignal | None] = None
    """The receipt of SIGTERM in this process; the class made by `actor_class` has it."""

    def __init__(self, config: WorkerConfig, build: BuildWorker, log_level: int) -> None:
        set_up_log(log_level, config.log_format, worker=config.name, role=config.role.value)
        self._config = config
        self._build = build
        self._worker: HostedWorker | None = None
        """The worker, once it has started."""
        self._beginner: HostedWorker | None = None
        """The worker from the beginning of its start."""
        self._info: WorkerInfo | None = None
        self._home: NumaHome | None = None
        self._starting: asyncio.Task[WorkerInfo] | None = None
        self._stopping = False
        self._end = WorkerEnd.LOST
        self._ending = asyncio.Event()
        self._heard = asyncio.Event()
        # Each of these ends the process for a reason of its own.
        self._on_sigterm: asyncio.Task[None] | None = None
        self._on_engine_death: asyncio.Task[None] | None = None
        self._on_drained: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Return what Ray prints before each line of the worker's log."""
        return self._config.name

    async def start(self) -> Started:
        """Build and start the worker: once in a process, even if this is called repeatedly.

        A failure in the actor's constructor would be a crash, which Ray repeats for
        ever; here it is an exception, and the supervisor decides.
        """
        if self._starting is None:
            self._on_sigterm = asyncio.create_task(self._handle_sigterm())
            self._starting = asyncio.create_task(self._start())
        info = await asyncio.shield(self._starting)
        return Started(info, await self.process(), ray.util.get_node_ip_address())

    async def restart(self) -> Started:
        """Start the worker in a later process, without the faults that the first one was to have.

        Other faults can still be armed.
        """
        if self._config.faults:
            self._config = dataclasses.replace(self._config, faults=())
        return await self.start()

    async def weights_read(self) -> float:
        """Return the share of its weights that the worker has read, from 0 to 1."""
        return 0.0 if self._beginner is None else self._beginner.weights_read

    async def current(self) -> WorkerInfo | None:
        """Return the worker that runs in this process; None before it has started."""
        return self._info

    async def process(self) -> ProcessIdentity | None:
        """Return this process's identity on its machine; None where the system does not tell it."""
        return ProcessIdentity.of_this_process()

    async def end_process(self, identity: ProcessIdentity) -> bool:
        """End an earlier process of this worker, and wait until it has ended.

        Returns False at once if it cannot be seen from here: it is on another machine.
        """
        process = WorkerProcess.find(identity)
        if process is None:
            return False
        try:
            process.kill()
            await process.ended()
        finally:
            process.close()
        return True

    async def watch(self, incarnation: str) -> None:
        """Wait for the end of this process, which fails the call.

        Returns at once in a process that is not this incarnation's.
        """
        if self._info is not None and self._info.incarnation == incarnation:
            await asyncio.Event().wait()

    async def heartbeat(self, incarnation: str, renewal: Renewal | None) -> float | None:
        """Return when the engine and the transfer agent, not only this process, have answered.

        The lease is then renewed. Raises StaleEpochError if the caller is no longer the controller.

        Args:
            incarnation: the incarnation whose lease is renewed.
            renewal: the renewal; None: the lease runs on as it is.

        Returns:
            the stamp for the next renewal; None: this is not the incarnation's process.
        """
        if self._worker is not None:
            await self._worker.heartbeat()
        worker = self._worker_of(incarnation)
        if worker is None:
            return None
        if renewal is not None:
            worker.lease.renew(renewal)
        return worker.lease.stamp()

    async def begin_drain(self, incarnation: str) -> None:
        """Begin to drain the worker; when that is done, the process ends by itself.

        SIGTERM does the same. Does nothing in a process that is not this incarnation's.
        """
        worker = self._worker_of(incarnation)
        if worker is not None:
            worker.begin_drain()

    async def draining(self, incarnation: str) -> bool:
        """Wait until the worker drains, for any reason.

        Returns False at once in a process that is not this incarnation's.
        """
        worker = self._worker_of(incarnation)
        if worker is not None:
            await worker.draining()
        return worker is not None

    async def quarantine_too_old(self, incarnation: str) -> bool:
        """Wait until memory is in quarantine for too long, so that the worker should drain.

        Returns False at once in a process that is not this incarnation's.
        """
        worker = self._worker_of(incarnation)
        if worker is not None:
            await worker.quarantine_too_old()
        return worker is not None

    async def drain_if_quarantine_too_old(self, incarnation: str) -> bool:
        """Begin to drain the worker if its quarantine is still too old; return whether it is."""
        worker = self._worker_of(incarnation)
        return worker is not None and await worker.drain_if_quarantine_too_old()

    async def stop(self) -> None:
        """Stop the worker in good order; the process stays, and the supervisor ends it."""
        self._stopping = True
        for task in (self._on_engine_death, self._on_drained):
            if task is not None:
                task.cancel()
        if self._worker is not None:
            await self._worker.stop()

    async def arm(self, faults: Sequence[Fault]) -> None:
        """Inject these faults from now on, if the worker was started with ``--debug-faults``."""
        assert self._worker is not None
        self._worker.faults.arm(faults)

    async def faults_fired(self) -> int:
        """Return how many of the faults that were last armed have happened."""
        assert self._worker is not None
        return self._worker.faults.fired

    async def peers_died(self, incarnations: Sequence[str]) -> None:
        """Tell the worker that these incarnations provably serve no more.

        It may know already. A process whose worker has not started shares nothing with them.
        """
        if self._worker is None:
            return
        for incarnation in incarnations:
            await self._worker.peer_died(incarnation)

    async def last_word(self, incarnation: str) -> WorkerEnd:
        """Wait until the process is about to end by itself; return the cause.

        The process ends once the caller confirms with `last_word_heard`, or soon after. Returns
        LOST at once in a process that is not this incarnation's and so does not know its end.
        """
        if self._worker_of(incarnation) is None:
            return WorkerEnd.LOST
        await self._ending.wait()
        return self._end

    async def last_word_heard(self, incarnation: str) -> None:
        """Let the process end, if it is this incarnation's."""
        if self._worker_of(incarnation) is not None:
            self._heard.set()

    async def _say_last_word(self, end: WorkerEnd) -> None:
        self._end = end
        self._ending.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), _LAST_WORD_SECONDS)

    def _worker_of(self, incarnation: str) -> HostedWorker | None:
        """Return the worker, if it has started and is this incarnation."""
        if self._info is None or self._info.incarnation != incarnation:
            return None
        return self._worker

    async def _start(self) -> WorkerInfo:
        config = dataclasses.replace(self._config, black_box=_black_box())
        # On this thread, whose children inherit it, and before any of them allocates.
        self._home = keep_to_one_node(config.threads, config.device)
        config = await asyncio.to_thread(on_this_node, config)
        self._beginner = worker = self._build(config)
        self._info = await worker.start()
        add_to_log(incarnation=self._info.incarnation)
        worker.lease.begin(config.lease_seconds, self._end_without_lease)
        threading.Thread(target=worker.lease.watch, name="lease", daemon=True).start()
        self._worker = worker
        self._on_engine_death = asyncio.create_task(self._exit_if_engine_dies(worker))
        self._on_drained = asyncio.create_task(self._exit_when_drained(worker))
        return self._info

    async def _handle_sigterm(self) -> None:
        """Drain a serving worker at the first SIGTERM; end the process at any other."""
        if self.sigterm is None:
            return
        await self.sigterm.received()
        if self._worker is not None and not self._stopping:
            _log.warning("SIGTERM: the worker drains")
            self._worker.begin_drain()
            await self.sigterm.received()
        os._exit(128 + signal.SIGTERM)

    def _end_without_lease(self) -> None:
        """End the process at once, on any thread: others may take it for dead."""
        line = "no controller has renewed the lease for %g s (--worker-lease), so the process ends"
        # Another thread may hold the log's lock for as long as nobody reads standard error.
        saying = threading.Thread(
            target=_log.critical, args=(line, self._config.lease_seconds), daemon=True
        )
        saying.start()
        saying.join(_LAST_LINE_SECONDS)
        os._exit(_LEASE_RAN_OUT)

    async def _exit_when_drained(self, worker: HostedWorker) -> None:
        await worker.drained()
        if self._on_engine_death is not None:
            self._on_engine_death.cancel()
        await worker.stop()
        _log.warning("the worker has drained, so the process ends")
        await self._say_last_word(WorkerEnd.DRAINED)
        logging.shutdown()
        os._exit(_DRAINED)

    async def _exit_if_engine_dies(self, worker: HostedWorker) -> None:
        reason = await worker.failed()
        _log.critical("the engine has died, so the process ends too: %s", reason)
        await self._say_last_word(WorkerEnd.of_failure(reason))
        logging.shutdown()
        os._exit(_ENGINE_DIED)


def _black_box() -> Path | None:
    """Return a file that all processes of this actor on this machine share.

    Ray removes its folder.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if not hasattr(context, "get_temp_dir"):  # an older Ray
        return None
    folder = Path(context.get_temp_dir()) / context.get_session_name()
    return folder / f"{context.get_actor_id()}.step" if folder.is_dir() else None


class _MadeOnArrival:
    """An object that is pickled as a call of `make`; unpickling it yields the call's result."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self._make, ()


def _term_signal() -> TermSignal | None:
    """Make the receipt of SIGTERM in the main thread; None in any other thread."""
    return TermSignal() if threading.current_thread() is threading.main_thread() else None


def actor_class(role: WorkerRole) -> type[WorkerHost]:
    """Make the class of a role's actors for Ray; its name becomes the process's title.

    The class also replaces Ray's handler of SIGTERM, which would end the process at once. Python
    sets signal handlers in the main thread alone, and Ray runs an actor's methods, even its
    constructor, in other threads. But it unpickles the actor's class in the main thread. So the
    class has an attribute that is pickled as a call of `TermSignal`, which sets the handler. The
    class is made here and not at the top of the module. A class that can be imported is pickled by
    its name, without its attributes. Ray's `worker_process_setup_hook` runs in the main thread as
    well, but before Ray sets its own handler. A controller that finds the actor by its name also
    unpickles the class, but in another thread, and sets nothing.
    """
    attributes = {"sigterm": _MadeOnArrival(_term_signal)}
    return type(actor_class_name(role), (WorkerHost,), attributes)


def actor_class_name(role: WorkerRole) -> str:
    """Return Ray's name for the class of a role's actors."""
    return f"{role.capitalize()}Worker"
