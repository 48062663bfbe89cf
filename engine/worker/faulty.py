"""An outbox, an agent, an executor and copies that inject faults, if the configuration says so."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvrelay.engine.executor.step import Executor, LaunchedStep, PassingExecutor, Step
from kvrelay.engine.faults import FaultAction, FaultEvent, FaultPlan
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.outbox import MessageStream, MessageT, Outbox, Sink
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.host.tier_copies import CopyStream, PageMoves
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.storage.storage_orders import Fetch, StorageOrder, StorageStream, Store
from kvrelay.wire.hand_over import (
    Announce,
    Ask,
    Begun,
    Done,
    Ended,
    Grant,
    Held,
    Released,
    Sequenced,
)
from kvrelay.wire.model_digest import ModelDigest

RequestT = TypeVar("RequestT")

_EVENTS: dict[type, FaultEvent] = {
    Ask: FaultEvent.ASK,
    Grant: FaultEvent.GRANT,
    Announce: FaultEvent.ANNOUNCE,
    Done: FaultEvent.DONE,
    Released: FaultEvent.RELEASED,
    Ended: FaultEvent.ENDED,
    Held: FaultEvent.HELD,
    Begun: FaultEvent.BEGUN,
}


class _Break(Sink[object]):
    """A sink that ends a stream in place of a message."""

    def __init__(self, stream: MessageStream[Any]) -> None:
        self._stream = stream

    def deliver(self, message: object) -> None:
        """Close the stream instead."""
        self._stream.close()


class FaultyOutbox(Outbox):
    """An outbox that delays, drops, duplicates or breaks hand-over messages as planned.

    Args:
        call_soon: runs a function with its arguments on the event loop, soon.
        plan: the faults.
    """

    def __init__(self, call_soon: Callable[..., object], plan: FaultPlan) -> None:
        super().__init__(call_soon)
        self._plan = plan
        self._held: dict[int, list[tuple[Sink[Any], Any]]] = {}
        self._lock = threading.Lock()

    def put(self, sink: Sink[MessageT], message: MessageT) -> None:
        """Send `message` at the next flush, unless a fault is due for it."""
        with self._lock:
            if id(sink) in self._held:
                self._held[id(sink)].append((sink, message))
                return
        event = _EVENTS.get(type(message.message)) if isinstance(message, Sequenced) else None
        fault = self._plan.take(event) if event is not None else None
        if fault is None:
            super().put(sink, message)
            return
        match fault.action:
            case FaultAction.DELAY:
                self._held[id(sink)] = [(sink, message)]
                threading.Timer(fault.seconds, self._release, (id(sink),)).start()
            case FaultAction.DUPLICATE:
                super().put(sink, message)
                super().put(sink, message)
            case FaultAction.FAIL:
                assert isinstance(sink, MessageStream)
                super().put(_Break(sink), None)

    def _release(self, key: int) -> None:
        with self._lock:
            for sink, message in self._held.pop(key):
                self._call_soon(sink.deliver, message)


class FaultyTransferAgent(TransferAgent):
    """A transfer agent that delays, drops, duplicates, fails or corrupts reads as planned.

    Args:
        plan: the faults.
        incarnation, pools, on_failure, model, before_progress, host_pools: as of `TransferAgent`.
    """

    def __init__(
        self,
        plan: FaultPlan,
        incarnation: str,
        pools: Sequence[KVPool],
        on_failure: Callable[[str], None],
        model: ModelDigest,
        before_progress: Callable[[], object],
        host_pools: Sequence[KVPool],
    ) -> None:
        self._plan = plan
        self._pools = pools
        super().__init__(incarnation, pools, on_failure, model, before_progress, host_pools)

    def submit(self, pull: Pull, on_end: Callable[[Pull], None]) -> None:
        """Start a pull, as `TransferAgent.submit` does, unless the plan has a fault for it."""
        fault = self._plan.take(FaultEvent.PULL)
        if fault is None:
            super().submit(pull, on_end)
            return
        match fault.action:
            case FaultAction.DELAY:
                threading.Timer(fault.seconds, super().submit, (pull, on_end)).start()
            case FaultAction.FAIL:
                self.call_soon(lambda: _fail(pull, on_end))
            case FaultAction.DUPLICATE:
                super().submit(pull, _twice(on_end))
            case FaultAction.CORRUPT:
                super().submit(pull, self._flips(on_end))
            case _:
                super().submit(pull, lambda pull: None)

    def _flips(self, on_end: Callable[[Pull], None]) -> Callable[[Pull], None]:
        """Wrap `on_end` so that a bit flips in the first token on the last page."""

        def flip(pull: Pull) -> None:
            pool, page = [
                (pool, int(pages[-1]))
                for pool, pages in zip(self._pools, pull.local_pages, strict=True)
                if len(pages)
            ][-1]
            pool.layer(0)[page].view(torch.uint8)[0, 0, 0, 0] ^= 4
            on_end(pull)

        return flip


class FaultyCopies:
    """A `CopyStream` whose worker may be stopped or killed when a copy has begun.

    Args:
        stream: copies.
        plan: the faults.
    """

    def __init__(self, stream: CopyStream, plan: FaultPlan) -> None:
        self._stream = stream
        self._plan = plan

    def start(self, moves: PageMoves) -> None:
        """Order a copy, as the stream does."""
        self._stream.start(moves)
        self._plan.reach(Phase.WRITING_BACK if moves.to_host else Phase.PREFETCHING)


class FaultyExecutor(PassingExecutor):
    """An executor whose forwards are late, hang or fail as planned; on the forward thread.

    Args:
        executor: computes the forwards that have no fault.
        plan: the faults.
    """

    def __init__(self, executor: Executor, plan: FaultPlan) -> None:
        super().__init__(executor)
        self._plan = plan

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """Launch one step, unless the plan has a fault for it."""
        computed: Sequence[Any] = [item.request for item in step.scheduled if item.is_live]
        requests = {request.key.request_id for request in computed}
        fault = self._plan.take(FaultEvent.FORWARD, requests=requests) if requests else None
        match fault.action if fault else None:
            case FaultAction.HANG:
                self._plan.hang()
            case FaultAction.FAIL:
                raise RuntimeError("injected")
            case FaultAction.POISON:
                raise RuntimeError("CUDA error: injected")
            case FaultAction.CRASH:
                # In this thread, as a real fault: from another one, this thread would go on.
                signal.raise_signal(signal.SIGSEGV)
            case FaultAction.DELAY:
                assert fault is not None
                time.sleep(fault.seconds)
        return super().launch(step)


def _twice(on_end: Callable[[Pull], None]) -> Callable[[Pull], None]:
    def tell(pull: Pull) -> None:
        on_end(pull)
        on_end(pull)

    return tell


def _fail(pull: Pull, on_end: Callable[[Pull], None]) -> None:
    """End a pull as failed before it has begun."""
    pull.refuse("injected")
    on_end(pull)


class FaultyStorage:
    """A `StorageStream` that reports the phases in which pages go to storage, or come from there.

    Args:
        stream: carries the orders out.
        plan: the faults.
    """

    def __init__(self, stream: StorageStream, plan: FaultPlan) -> None:
        self._stream = stream
        self._plan = plan

    def start(self, order: StorageOrder) -> None:
        """See `StorageStream`. May not return."""
        self._stream.start(order)
        if isinstance(order, Store):
            self._plan.reach(Phase.STORING)
        elif isinstance(order, Fetch):
            self._plan.reach(Phase.FETCHING)
