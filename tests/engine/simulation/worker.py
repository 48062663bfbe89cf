"""One worker: the real engine and scheduler, without threads."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.aggregated_worker.scheduler import AggregatedScheduler
from kvrelay.decode_worker.hand_over_stream import ConnectAnew, OpenStream
from kvrelay.decode_worker.hand_over_stream import HandOverStream as DecodeStream
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.step import Step, execute_or_fail
from kvrelay.engine.scheduler.commands import Attach, Drain, Inbox
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.loop import Engine
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.worker.memory import make_host_tier, make_kv_cache, tokens_ahead
from kvrelay.mem_cache.host_tier import HostTier
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.prefix_log import PrefixLog
from kvrelay.mem_cache.radix_tree import RadixTree
from kvrelay.mem_cache.shape import PoolShape, window_pages
from kvrelay.mem_cache.tier_copies import CopyEnded, CopyStream, PageMoves
from kvrelay.mem_cache.tier_speed import TierSpeed
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.wire.hand_over import PageSum
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.request import RequestKey
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.simulation.agent import SimAgent
from tests.engine.simulation.model import CountingModel, GuessDrafter, RealModel, SimModel, Windows

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
    copies: deque[PageMoves] = field(default_factory=deque)
    """Between the device and the host, that were ordered and have not ended."""
    steps: deque[Step[Any]] = field(default_factory=deque)
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
    copy_fails: Callable[[PageMoves], bool] | None = None
    """Whether a copy moves no byte, and ends with an error; None: none does."""

    def __post_init__(self) -> None:
        self.model, self.kv_cache = self._load()
        self.executor = self.model.executor
        self.agent = SimAgent(self.name)
        self.inbox: Inbox[Any] = Inbox()
        outbox = Outbox(lambda function, *args: function(*args))
        self.tier = self._make_tier()
        self.context: SchedulerContext[Any] = SchedulerContext(
            self.kv_cache,
            outbox,
            WorkerMetrics(self.config),
            chunk_tokens=self.config.chunk_tokens,
            host_tier=self.tier,
            wake_in=lambda seconds: self.wakes.append(self.kv_cache.clock() + seconds),
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
            model = RealModel(self.config)
            return model, make_kv_cache(self.config, model.pools, self.most_tokens)
        ahead, log = tokens_ahead(self.config), PrefixLog(PageHashes(NO_MODEL, self.page_size))
        shapes = [self._shape(window, ahead) for window in self.windows]
        kv_cache = KVCacheManager(
            shapes,
            page_size=self.page_size,
            total_rows=self.rows,
            max_row_tokens=self.most_tokens,
            ahead=ahead,
            index=RadixTree(self.page_size, self.windows, log=log) if self.cached else None,
            # Nobody ever gives a copy up for being late: a run must be reproducible.
            clock=time.monotonic if not self.host_pages else lambda: 0.0,
        )
        drafter = GuessDrafter(0, self.windows) if self.config.drafts_for(True) else None
        return CountingModel(shapes, self.page_size, drafter), kv_cache

    def _make_tier(self) -> HostTier | None:
        if isinstance(self.model, RealModel):
            if not self.model.host_pools:
                return None
            return make_host_tier(self.kv_cache, self.model.host_pools, self.copy_stream, math.inf)
        if not self.host_pages:
            return None
        self.model.make_host(self.host_pages)
        assert isinstance(self.kv_cache.index, RadixTree)
        log = self.kv_cache.index.log
        assert log is not None
        speed = TierSpeed(math.inf)
        return HostTier(self.kv_cache, log, self.host_pages, PAGE_BYTES, self.copy_stream, speed)

    @property
    def copy_stream(self) -> CopyStream:
        """Keeps what is ordered until it is told to end."""
        return SimCopies(self.copies)

    def end_copy(self) -> None:
        """Make the oldest copy, all at once, or let it fail, and tell that it has ended."""
        moves, error = self.copies.popleft(), ""
        if self.copy_fails is not None and self.copy_fails(moves):
            error = "injected"
        else:
            self.model.copy_tier(moves)
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
        on_end(tuple(PageSum(*page.place, self.counting.sum(page)) for page in pages))

    def end_step(self) -> None:
        step = self.steps.popleft()
        live = [item for item in step.scheduled if item.token_state.broken is None]
        self.model.broken = {i for i, item in enumerate(live) if item.request.key in self.broken}
        if step.copies:
            self.executor.copy(step.copies)
        ended = self.executor.execute(step)
        seconds = self.forward_seconds or ended.seconds
        self.inbox.post(replace(ended, seconds=seconds))

    def fail_step(self, error: str = "injected") -> None:
        step, self.model.fails = self.steps.popleft(), error
        ended = execute_or_fail(self.executor, step)
        self.model.fails = ""
        self.inbox.post(ended)


def count(worker: SimWorker, counter: str) -> float:
    labels = {"role": worker.role_name, "worker": worker.name, "model": "sim"}
    value = worker.context.metrics.registry.get_sample_value(f"kvrelay_{counter}_total", labels)
    assert value is not None
    return value
