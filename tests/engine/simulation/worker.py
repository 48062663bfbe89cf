"""One worker: the real engine and scheduler, without threads."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvrelay.aggregated_worker.scheduler import AggregatedScheduler
from kvrelay.decode_worker.hand_over_stream import ConnectAnew, OpenStream
from kvrelay.decode_worker.hand_over_stream import HandOverStream as DecodeStream
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.device.device_streams import DeviceEvent
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.pipeline import StepPipeline
from kvrelay.engine.executor.step import Step, StepEnded
from kvrelay.engine.faults import FaultPlan
from kvrelay.engine.scheduler.commands import Attach, Drain, Inbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.loop import Engine
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.worker.faulty import FaultyCopies, FaultyStorage
from kvrelay.engine.worker.memory import make_host_tier, make_kv_cache, make_store, tokens_ahead
from kvrelay.mem_cache.host.host_tier import HostTier
from kvrelay.mem_cache.host.storage_tier import StorageTier
from kvrelay.mem_cache.host.tier_copies import CopyEnded, CopyStream, PageMoves
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.prefix.retention import Retention
from kvrelay.mem_cache.shape import PoolShape, window_pages
from kvrelay.mem_cache.storage.storage_pages import PageStore, StoreState
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.wire.hand_over import PageSum
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation.agent import SimAgent
from tests.engine.simulation.model import CountingModel, GuessDrafter, RealModel, SimModel, Windows
from tests.engine.simulation.storage import SimStorage
from tests.late_device import LateStreams

MAX_TOKENS = 2048
"""Of one request."""
PAGE_BYTES = 1 << 20
"""That a page of a counting model is said to have: it decides how copies are cut."""


@dataclass(eq=False)
class SimCopies:
    """A `CopyStream` of which each copy waits to be made."""

    ordered: deque[PageMoves]

    def start(self, moves: PageMoves) -> None:
        self.ordered.append(moves)


class StrictPipeline(StepPipeline[Any]):
    """Steps in flight; what fails is a fault of the test's subject."""

    def _fail(self, step: Step[Any], *args: Any, **options: Any) -> StepEnded[Any]:
        raise next(one for one in args if isinstance(one, Exception))


@dataclass(eq=False)
class SimWorker:
    """One worker: the real engine over a pool of integers."""

    name: str
    role_name: WorkerRole
    pages: int
    page_size: int
    rows: int
    cached: bool
    windows: Windows
    config: WorkerConfig
    tokenizer: Any = None
    """Only a real model has one."""
    most_tokens: int = MAX_TOKENS
    """Of a request."""
    host_pages: int = 0
    """Of a host tier below a counting model."""
    make_store: Callable[[SimWorker], PageStore] | None = None
    """Makes what is below the host tier; None: nothing is."""
    copies: deque[PageMoves] = field(default_factory=deque)
    """Between the device and the host, that were ordered and have not ended."""
    device: LateStreams | None = None
    """What computes late; None: a step is computed when it ends."""
    now: Callable[[], float] = lambda: 0.0
    """The moment, by which requests have waited."""
    steps: deque[Step[Any]] = field(default_factory=deque)
    """Those that the engine has launched and that have not ended."""
    not_taken: deque[Step[Any]] = field(default_factory=deque)
    """Of these, those that the device was not given yet."""
    opened: list[DecodeStream] = field(default_factory=list)
    connected_anew: list[str] = field(default_factory=list)
    """Peers, each time that one is to be connected anew."""
    broken: set[RequestKey] = field(default_factory=set)
    """Requests whose logits are not finite here."""
    draining: bool = False
    """The router knows that it takes no more requests."""
    drained: bool = False
    forward_seconds: float = 0.0
    """What the forwards that end now are said to have taken."""
    wakes: list[float] = field(default_factory=list)
    """Moments at which the loop wants to run a pass."""
    copy_seconds: float = 0.0
    """What the copy that ends next is said to have taken."""
    storage_seconds: float = 0.0
    """What storage is said to have taken for what ends next."""
    copy_fails: Callable[[PageMoves], bool] | None = None
    """Whether a copy leaves wrong bytes, and ends with an error; None: none does."""

    def __post_init__(self) -> None:
        self.model, self.kv_cache = self._load()
        self.executor = self.model.executor
        self.pipeline = StrictPipeline(self.executor)
        self.copies_home: deque[DeviceEvent] = deque()
        """Of each of `copies`."""
        self.failed_copies: set[int] = set()
        """Operations of which no byte was moved."""
        self.agent = SimAgent(self.name)
        self.inbox: Inbox[Any] = Inbox()
        outbox = Outbox(lambda function, *args: function(*args))
        self.faults = FaultPlan()
        self.tier = self._make_tier()
        self.storage = self._make_storage()
        self.context: SchedulerContext[Any] = SchedulerContext(
            self.kv_cache,
            outbox,
            WorkerMetrics(self.config),
            self.faults,
            chunk_tokens=self.config.chunk_tokens,
            host_tier=self.tier,
            wake_in=lambda seconds: self.wakes.append(self.kv_cache.clock() + seconds),
            clock=self.now,
        )
        scheduler: Any
        if self.role_name is WorkerRole.AGGREGATED:
            scheduler = AggregatedScheduler(self.context, self.tokenizer, self.config)
        elif self.role_name is WorkerRole.PREFILL:
            scheduler = PrefillScheduler(
                self.context, self.agent, self.inbox, self.tokenizer, self.config
            )
            # What is read must not depend on how fast the test runs.
            scheduler._histories._seconds_to_compute = lambda first, end: math.inf
        else:
            scheduler = DecodeScheduler(
                self.context, self.agent, self, self.inbox, self.tokenizer, self.config
            )
        self.scheduler = scheduler
        self.engine = Engine(
            self.context,
            scheduler,
            self,
            failed_forwards_limit=self.config.failed_forwards_limit,
            overlap=self.config.overlap,
            audit_pages=self.config.audit_pages,
        )
        self.link = RouterLink("router")
        self.inbox.post(Attach(self.link))

    def _load(self) -> tuple[SimModel, KVCacheManager]:
        if self.config.model_path is not None:
            model = RealModel(self.config, self.device)
            return model, make_kv_cache(self.config, model.pools, self.most_tokens)
        ahead, log = tokens_ahead(self.config), PrefixLog(PageHashes(NO_MODEL, self.page_size))
        shapes = [self._shape(window, ahead) for window in self.windows]
        tokens = [shape.total_pages * self.page_size for shape in shapes]
        retention = Retention.of_share(0.5, tokens, self.windows)
        index = RadixTree(self.page_size, self.windows, retention=retention, log=log)
        kv_cache = KVCacheManager(
            shapes,
            page_size=self.page_size,
            total_rows=self.rows,
            max_row_tokens=self.most_tokens,
            ahead=ahead,
            index=index if self.cached else None,
            # Nobody ever gives a copy up for being late: a run must be reproducible.
            clock=time.monotonic if not self.host_pages else lambda: 0.0,
        )
        drafts = self.config.drafts_for(True)
        drafter = GuessDrafter(0, self.windows, self.device) if drafts else None
        return CountingModel(shapes, self.page_size, drafter, self.device), kv_cache

    def _make_tier(self) -> HostTier | None:
        if isinstance(self.model, RealModel):
            if not self.model.host_pools:
                return None
            return make_host_tier(self.kv_cache, self.model.host_pools, self.copy_stream, math.inf)
        if not self.host_pages:
            return None
        # Of windows the host keeps half as many pages, so that some of them go by themselves.
        totals = [
            self.host_pages if window is None else -(-self.host_pages // 2)
            for window in self.windows
        ]
        self.model.make_host(totals)
        assert isinstance(self.kv_cache.index, RadixTree)
        log = self.kv_cache.index.log
        assert log is not None
        page_bytes = [PAGE_BYTES // len(totals)] * len(totals)
        speed = TierSpeed(math.inf)
        return HostTier(self.kv_cache, log, totals, page_bytes, self.copy_stream, speed)

    def _make_storage(self) -> SimStorage | None:
        if self.tier is None:
            return None
        store = None if self.make_store is None else self.make_store(self)
        if isinstance(self.model, RealModel):
            store = make_store(self.config, self.model.host_pools, self.model.digest)
        if store is None:
            return None
        stream, speed = SimStorage(store), TierSpeed(math.inf)
        self.tier.storage = StorageTier(
            self.tier.pages,
            self.tier.page_bytes,
            FaultyStorage(stream, self.faults),
            speed,
            StoreState(None),
            clock=lambda: self.kv_cache.clock(),
        )
        return stream

    def end_storage(self) -> None:
        """Carry out an order of storage, and tell that it has ended."""
        assert self.storage is not None
        self.inbox.post(self.storage.end(self.storage_seconds))

    @property
    def copy_stream(self) -> CopyStream:
        """Keeps what is ordered until it is told to end."""
        stream = SimCopies(self.copies) if self.device is None else self
        return FaultyCopies(stream, self.faults)

    def start(self, moves: PageMoves) -> None:
        """Launch a copy on the device's stream; this is the copy thread's part."""
        assert self.device is not None
        self.device.copies.launch(partial(self._copy, moves))
        self.copies.append(moves)
        self.copies_home.append(self.device.copies.record())

    def _copy(self, moves: PageMoves) -> None:
        if self.copy_fails is not None and self.copy_fails(moves):
            self.failed_copies.add(moves.operation)
            self.counting.spoil_tier(moves)
        else:
            self.model.copy_tier(moves)

    def end_copy(self) -> None:
        """Make the oldest copy, all at once, or let it fail, and tell that it has ended."""
        moves = self.copies.popleft()
        if self.device is None:
            self._copy(moves)
        else:
            self.copies_home.popleft()
        error = "injected" if moves.operation in self.failed_copies else ""
        self.inbox.post(CopyEnded(moves.operation, self.copy_seconds, error))

    def _shape(self, window: int | None, ahead: int) -> PoolShape:
        """A window pool is tight: two requests fit, and what is left over is cached."""
        if window is None:
            return PoolShape("full", self.pages)
        return PoolShape("window", 2 * window_pages(window, self.page_size, ahead), window)

    def deliver(self, command: OpenStream | ConnectAnew) -> None:
        """Keep what is to be opened, or connected; this is the hand-over client's part."""
        if isinstance(command, OpenStream):
            self.opened.append(command.stream)
        else:
            self.connected_anew.append(command.peer.incarnation)

    def launch(self, step: Step[Any]) -> None:
        """Keep a step until it is told to end; this is the launcher's part."""
        self.steps.append(step)
        if self.device is not None:
            self.not_taken.append(step)

    def take_step(self) -> None:
        """Give the next step to the device; this is the forward thread's part."""
        self._tell(self.pipeline.launch(self.not_taken.popleft()))

    @property
    def is_home(self) -> bool:
        """Whether the results of the device's oldest step are on the host."""
        oldest = self.pipeline.oldest
        return oldest is not None and oldest.home.passed()

    def read_home(self) -> None:
        """End the device's oldest step; this is the forward thread's part."""
        assert self.pipeline.oldest is not None
        self._tell(self.pipeline.finish(self.pipeline.oldest))

    def _tell(self, ends: Iterable[StepEnded[Any]]) -> None:
        for ended in ends:
            assert self.steps.popleft() is ended.step
            self.inbox.post(replace(ended, seconds=self.forward_seconds or ended.seconds))

    def turn(self) -> None:
        if self.inbox:
            self.engine.run_pass(self.inbox.take_all())

    def drain(self) -> None:
        self.inbox.post(Drain(self._has_drained))

    def _has_drained(self) -> None:
        assert not self.drained
        self.drained = True

    @property
    def counting(self) -> CountingModel:
        """The model, which must not be a real one."""
        assert isinstance(self.model, CountingModel)
        return self.model

    def hash(self) -> None:
        """End the oldest order of the hasher's thread."""
        pages, on_end = self.agent.to_hash.pop(0)
        on_end(tuple(PageSum(*page.place, self.model.sum(page)) for page in pages))

    def end_step(self) -> None:
        step = self.steps.popleft()
        live = [item for item in step.scheduled if item.token_state.broken is None]
        self.model.broken = {i for i, item in enumerate(live) if item.request.key in self.broken}
        if step.copies:
            self.executor.copy(step.copies)
        ended = self.executor.finish(self.executor.launch(step))
        seconds = self.forward_seconds or ended.seconds
        self.inbox.post(replace(ended, seconds=seconds))

    def fail_step(self, error: str = "injected") -> None:
        step, self.model.fails = self.steps.popleft(), error
        [ended] = StepPipeline[Any](self.executor).launch(step)
        self.model.fails = ""
        self.inbox.post(ended)


def count(worker: SimWorker, counter: str) -> float:
    labels = {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    value = worker.context.metrics.registry.get_sample_value(f"kvrelay_{counter}_total", labels)
    assert value is not None
    return value
