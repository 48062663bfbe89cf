"""The assembly of a worker's engine: memory, scheduler, threads. Only the forward thread runs yet.

The parts refer to each other in one direction. The engine thread runs the engine, the engine runs
the role's scheduler and launches steps on the forward thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc
from tokenizers import Tokenizer

from kvrelay.device.thread_end import close_all
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.borrowed_threads import BorrowedThreads
from kvrelay.engine.executor.copy_thread import CopyThread, measure_bytes_per_second
from kvrelay.engine.executor.forward_thread import ForwardThread
from kvrelay.engine.executor.step import Executor
from kvrelay.engine.executor.storage_thread import StorageThread
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.scheduler.commands import GiveUp, Inbox, Wake
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.loop import Engine, EngineMessage, EngineThread, Scheduler
from kvrelay.engine.scheduler.metrics import GRAMMAR_HITS, GRAMMAR_SECONDS, WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox
from kvrelay.engine.scheduler.request import Request
from kvrelay.engine.worker.black_box import BlackBox, RecordingExecutor
from kvrelay.engine.worker.faulty import (
    FaultyCopies,
    FaultyExecutor,
    FaultyOutbox,
    FaultyStorage,
    FaultyTransferAgent,
)
from kvrelay.engine.worker.load_reports import INTERVAL_SECONDS
from kvrelay.engine.worker.loading import LoadedModel
from kvrelay.engine.worker.machine_cores import MachineCores
from kvrelay.engine.worker.memory import make_host_tier, make_kv_cache, make_store
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.mem_cache.host.storage_tier import StorageTier
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.prefix.prefix_log import PageListener
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.wire.worker_info import WorkerRole

RequestT = TypeVar("RequestT", bound=Request)
MessageT = TypeVar("MessageT")


@dataclass(frozen=True, slots=True)
class WorkerParts(Generic[RequestT, MessageT]):
    """The parts that a role's scheduler is built from."""

    config: WorkerConfig
    context: SchedulerContext[RequestT]
    inbox: Inbox[EngineMessage[RequestT, MessageT]]
    transfer_agent: TransferAgent | None
    tokenizer: Tokenizer
    vocab_size: int

    @property
    def agent(self) -> TransferAgent:
        """The agent that reads peers' pages and lets peers read; an aggregated worker has none."""
        assert self.transfer_agent is not None, f"{self.config.name} has no peers"
        return self.transfer_agent


class RolePlugin(Protocol):
    """An interface for the parts that are particular to a worker's role."""

    @property
    def scheduler(self) -> Scheduler[Any, Any]:
        """The scheduler that the engine runs."""
        ...

    def register(self, server: grpc.aio.Server) -> None:
        """Add the role's own services."""
        ...

    async def peer_died(self, incarnation: str) -> None:
        """Drop connections to a worker that is gone."""
        ...

    async def close(self) -> None:
        """End everything that the role runs on the event loop."""
        ...


MakePlugin = Callable[[WorkerParts[Any, Any]], RolePlugin]


@dataclass(frozen=True, slots=True)
class Assembly:
    """A worker's engine and everything that it runs on."""

    inbox: Inbox[Any]
    metrics: WorkerMetrics
    agent: TransferAgent | None
    kv_cache: KVCacheManager
    plugin: RolePlugin
    forward: ForwardThread[Any]
    engine: EngineThread[Any, Any]
    copies: CopyThread | None
    """The thread that copies between device and host, if there is a host tier."""
    storage: StorageThread | None
    """The thread that writes and reads storage, if there is any."""
    pinned: PinnedPools
    """The pinned pools of the host, which a GPU copies."""
    cores: MachineCores | None
    """The cores that it shares with the machine's other workers."""

    def hang(self, config: WorkerConfig) -> GiveUp | None:
        """Find work that takes longer than the options allow. Returns what to do, or None."""
        watched = [("forward", self.forward.work)]
        if self.agent is not None:
            watched.append(("hashing", self.agent.hashing))
            watched.append(("call of NIXL", self.agent.slow_calls))
        if self.copies is not None:
            watched.append(("copy to or from the host", self.copies.work))
        for name, work in watched:
            oldest = work.oldest
            if oldest is not None and oldest.seconds > config.step_bound_seconds(oldest.tokens):
                of_tokens = f" of {oldest.tokens} tokens" if oldest.tokens else ""
                reason = (
                    f"the {name}{of_tokens} has not ended for "
                    f"{oldest.seconds:.0f} s (--step-timeout)"
                )
                return GiveUp(reason, oldest.number if work is self.forward.work else None)
        return None

    def stop_threads(self) -> None:
        """End the threads in the order in which they depend on each other. Blocks."""
        close_all(self.engine, self.forward, self.copies, self.storage, self.agent)
        if all(one is None or one.has_ended for one in (self.forward, self.copies, self.agent)):
            self.pinned.close()  # what hangs would lose its memory, or let this hang on the device
            if self.cores is not None:
                self.cores.close()


def assemble(
    config: WorkerConfig,
    model: LoadedModel,
    agent: TransferAgent | None,
    tokenizer: Tokenizer,
    make_plugin: MakePlugin,
    *,
    faults: FaultPlan,
    black_box: BlackBox | None,
    call_soon: Callable[..., object],
    on_failure: Callable[[str], None],
    page_listener: PageListener | None = None,
) -> Assembly:
    """Put a worker's engine together.

    Args:
        config: the worker's.
        model: computes its steps, and has its pools.
        agent: reads and serves these pools; None in a worker without peers.
        tokenizer: for stop strings.
        make_plugin: builds the role's part.
        faults: injected, if the configuration has any.
        black_box: records forwards, if there is one.
        call_soon: runs a function on the event loop, soon; from any thread.
        on_failure: called on a thread that gives up, with the reason.
        page_listener: hears which pages the prefix index has.
    """
    model.streams.enter_thread()  # what is measured below runs on this thread
    store = make_store(config, model.host_pools, model.digest)
    inbox: Inbox[Any] = Inbox()
    metrics = WorkerMetrics(config)
    metrics.pinned_bytes = model.pinned.nbytes
    metrics.product_ways = model.runner.product_ways
    model.grammars.on_compiled = partial(metrics.observe, GRAMMAR_SECONDS)
    model.grammars.on_hit = partial(metrics.count, GRAMMAR_HITS)
    kv_cache = make_kv_cache(config, model.pools, model.max_model_len, model.digest, page_listener)
    copies = _make_copy_thread(model, inbox)
    tier, storage = None, None
    if copies is not None:
        speed = measure_bytes_per_second(model.pools, model.host_pools)
        stream = copies if config.faults is None else FaultyCopies(copies, faults)
        tier = make_host_tier(kv_cache, model.host_pools, stream, speed)
        if store is not None:
            rate, state = TierSpeed(store.measure_bytes_per_second()), store.state()
            storage = StorageThread(store, inbox.post, on_failure)
            orders = storage if config.faults is None else FaultyStorage(storage, faults)
            tier.storage = StorageTier(tier.pages, tier.page_bytes, orders, rate, state)
    outbox = Outbox(call_soon) if config.faults is None else FaultyOutbox(call_soon, faults)
    context: SchedulerContext[Any] = SchedulerContext(
        kv_cache,
        outbox,
        metrics,
        faults,
        chunk_tokens=config.chunk_tokens,
        host_tier=tier,
        wake_in=partial(_wake_in, call_soon, inbox),
    )
    vocab_size = model.runner.config.vocab_size
    plugin = make_plugin(WorkerParts(config, context, inbox, agent, tokenizer, vocab_size))
    executor: Executor = model.executor
    if config.faults is not None:
        faults.lose_page = kv_cache.audit.lose_page
        executor = FaultyExecutor(executor, faults)
    if black_box is not None:
        executor = RecordingExecutor(executor, black_box)
    cores = MachineCores.join(config.threads) if model.runner.device.type == "cpu" else None
    model.executor.borrowed_threads = make_borrowed_threads(config, model.runner, cores)
    forward: ForwardThread[Any] = ForwardThread(executor, inbox.post, on_failure, model.streams)
    engine: Engine[Any, Any] = Engine(
        context,
        plugin.scheduler,
        forward,
        failed_forwards_limit=config.failed_forwards_limit,
        overlap=config.overlap,
        audit_pages=config.audit_pages,
        load_seconds=INTERVAL_SECONDS,
        cores=cores,
    )
    thread = EngineThread(engine, inbox, on_failure)
    threads = (forward, thread, copies, storage)
    return Assembly(inbox, metrics, agent, kv_cache, plugin, *threads, model.pinned, cores)


def make_borrowed_threads(
    config: WorkerConfig, runner: ModelRunner, cores: MachineCores | None
) -> BorrowedThreads | None:
    """Make the object that chooses the threads of large steps; None: they have the worker's own."""
    if cores is None or not runner.shares_prompts:
        return None
    most = min(config.prompt_threads or cores.num_cores, cores.num_cores)
    return BorrowedThreads(runner.kernel_threads, most, cores) if most > config.threads else None


def _make_copy_thread(model: LoadedModel, inbox: Inbox[Any]) -> CopyThread | None:
    if not model.host_pools:
        return None
    return CopyThread(model.pools, model.host_pools, inbox.post, model.streams)


def _wake_in(call_soon: Callable[..., object], inbox: Inbox[Any], seconds: float) -> None:
    """Make the engine's loop run a pass after `seconds`."""
    call_soon(lambda: asyncio.get_running_loop().call_later(seconds, inbox.post, Wake()))


def make_agent(
    config: WorkerConfig,
    incarnation: str,
    model: LoadedModel,
    faults: FaultPlan,
    on_failure: Callable[[str], None],
    before_progress: Callable[[], object],
) -> TransferAgent | None:
    """Register the model's pools with NIXL. Blocks for as long as that takes.

    Returns None for an aggregated worker, which has no peers that NIXL would have to listen for.
    """
    if config.role is WorkerRole.AGGREGATED:
        return None
    # The host of a decode worker is never read by peers.
    host = model.host_pools if config.role is WorkerRole.PREFILL else ()
    rest = (incarnation, model.pools, on_failure, model.digest, before_progress, host)
    return TransferAgent(*rest) if config.faults is None else FaultyTransferAgent(faults, *rest)
