"""An outbox and a transfer agent in which faults happen; in place of the real ones on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvrelay.engine.faults import Action, Event, FaultPlan
from kvrelay.engine.outbox import MessageStream, MessageT, Outbox, Sink
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.hand_over import Announce, Ask, Done, Ended, Grant, Released, Said
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.mem_cache.pool import KVPool

_EVENTS: dict[type, Event] = {
    Ask: Event.ASK,
    Grant: Event.GRANT,
    Announce: Event.ANNOUNCE,
    Done: Event.DONE,
    Released: Event.RELEASED,
    Ended: Event.ENDED,
}


class _Break(Sink[object]):
    """Ends a stream where a message would have been."""

    def __init__(self, stream: MessageStream[Any]) -> None:
        self._stream = stream

    def deliver(self, message: object) -> None:
        """See `Sink`."""
        self._stream.close()


class FaultyOutbox(Outbox):
    """An outbox whose hand-over messages meet the plan's faults.

    Args:
        call_soon: see `Outbox`.
        plan: the faults.
    """

    def __init__(self, call_soon: Callable[..., object], plan: FaultPlan) -> None:
        super().__init__(call_soon)
        self._plan = plan
        self._held: dict[int, list[tuple[Sink[Any], Any]]] = {}
        self._lock = threading.Lock()

    def put(self, sink: Sink[MessageT], message: MessageT) -> None:
        """See `Outbox`."""
        with self._lock:
            if id(sink) in self._held:
                self._held[id(sink)].append((sink, message))
                return
        event = _EVENTS.get(type(message.message)) if isinstance(message, Said) else None
        fault = self._plan.take(event) if event is not None else None
        if fault is None:
            super().put(sink, message)
            return
        match fault.action:
            case Action.DELAY:
                self._held[id(sink)] = [(sink, message)]
                threading.Timer(fault.seconds, self._release, (id(sink),)).start()
            case Action.DUPLICATE:
                super().put(sink, message)
                super().put(sink, message)
            case Action.FAIL:
                assert isinstance(sink, MessageStream)
                super().put(_Break(sink), None)

    def _release(self, key: int) -> None:
        with self._lock:
            for sink, message in self._held.pop(key):
                self._call_soon(sink.deliver, message)


class FaultyTransferAgent(TransferAgent):
    """A transfer agent whose reads meet the plan's faults.

    Args:
        plan: the faults.
        more: see `TransferAgent`.
    """

    def __init__(
        self,
        plan: FaultPlan,
        incarnation: str,
        pools: Sequence[KVPool],
        on_failure: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._pools = pools
        super().__init__(incarnation, pools, on_failure)

    def pull(
        self,
        peer: str,
        local_pages: Sequence[Int64Array],
        remote_pages: Sequence[Int64Array],
        on_end: Callable[[Pull], None],
    ) -> Pull:
        """See `TransferAgent`."""
        fault = self._plan.take(Event.PULL)
        if fault is None:
            return super().pull(peer, local_pages, remote_pages, on_end)
        match fault.action:
            case Action.DELAY:
                pull = Pull(peer, tuple(local_pages), tuple(remote_pages))
                threading.Timer(fault.seconds, self._order, (pull, on_end)).start()
                return pull
            case Action.FAIL:
                pull = Pull(peer, tuple(local_pages), tuple(remote_pages))
                self._orders.put(lambda: _fail(pull, on_end))
                return pull
            case Action.DUPLICATE:
                return super().pull(peer, local_pages, remote_pages, _twice(on_end))
            case Action.CORRUPT:
                return super().pull(peer, local_pages, remote_pages, self._flips(on_end))
            case _:
                return super().pull(peer, local_pages, remote_pages, lambda pull: None)

    def _flips(self, on_end: Callable[[Pull], None]) -> Callable[[Pull], None]:
        """Let a bit flip of the first token on the last page."""

        def flip(pull: Pull) -> None:
            pool, page = [
                (pool, int(pages[-1]))
                for pool, pages in zip(self._pools, pull.local_pages, strict=True)
                if len(pages)
            ][-1]
            pool.layer(0)[page].view(torch.uint8)[0, 0, 0, 0] ^= 4
            on_end(pull)

        return flip


def _twice(on_end: Callable[[Pull], None]) -> Callable[[Pull], None]:
    def tell(pull: Pull) -> None:
        on_end(pull)
        on_end(pull)

    return tell


def _fail(pull: Pull, on_end: Callable[[Pull], None]) -> None:
    """It never began, so nothing of it can arrive."""
    pull.state, pull.error = PullState.FAILED, "injected"
    pull.settle()
    on_end(pull)
