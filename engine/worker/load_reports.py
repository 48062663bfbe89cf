"""The reports of a worker's load to a router: when they are sent, and their content."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.load import PeerTransport, WorkerLoad
from kvrelay.wire.output import EngineOutputs

INTERVAL_SECONDS: Final = 0.1
"""The shortest time between two reports to one router, in the long run."""
BUSY_SECONDS: Final = 0.2
"""The time between two reports of a worker that stays busy: the router knows what it has sent."""
COMPANY_SECONDS: Final = 0.1
"""The time that the load of such a worker waits for a step's outputs, to go in their message."""
LONGEST_SECONDS: Final = 1.0
"""The longest time until a change is reported that is too small to matter for placement."""
_SMALL: Final = 1 / 64
"""The part of a pool's tokens below which a change is small."""
_NOTHING: Final = EngineOutputs(())


class LoadPace:
    """The times at which a router is told a load, on any clock of seconds.

    Reports have one slot each `INTERVAL_SECONDS`. The first change after a pause is reported at
    once, and later ones in the next slot, by their latest state. A worker that stays busy skips
    slots. The first work of an idle worker may take the next slot in advance. Draining, and refused
    peers, are always reported at once.
    """

    def __init__(self) -> None:
        self._told: WorkerLoad | None = None
        self._told_at = self._next_slot = -math.inf

    def due(self, load: WorkerLoad) -> float:
        """Compute when this load may be reported; infinity: it equals the last reported load."""
        told = self._told
        if told is None or load.draining != told.draining or _refuse_others(load, told):
            return -math.inf
        if load == told:
            return math.inf
        if told.is_idle and not load.is_idle:
            return self._next_slot - INTERVAL_SECONDS
        if not _matters(load, told):
            return max(self._next_slot, self._told_at + LONGEST_SECONDS)
        if self.stays_busy(load):
            return max(self._next_slot, self._told_at + BUSY_SECONDS)
        return self._next_slot

    def stays_busy(self, load: WorkerLoad) -> bool:
        """Whether the worker had something to do at its last report, and has now."""
        return self._told is not None and not self._told.is_idle and not load.is_idle

    def tell(self, load: WorkerLoad, now: float) -> None:
        """Note that this load is reported now."""
        self._told, self._told_at = load, now
        self._next_slot = max(self._next_slot, now) + INTERVAL_SECONDS


class PacedLink(RouterLink):
    """A router's stream that holds loads back until they are due, and nothing else.

    A report has the latest load, and those peers that have changed since the last one. A due load
    goes with the outputs of a step, if one ends soon. A message of its own costs both sides more
    than its content. Make and use it on the event loop.
    """

    def __init__(self, router: str) -> None:
        super().__init__(router)
        self._loop = asyncio.get_running_loop()
        self._pace = LoadPace()
        self._held: WorkerLoad | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told_peers: dict[str, PeerTransport] = {}

    def deliver(self, message: EngineOutputs) -> None:
        """Add a step's outputs for the router to the stream, and the load if it is due."""
        if message.load is None:
            super().deliver(message)
            return
        now, due = self._loop.time(), self._pace.due(message.load)
        due_alone = due + COMPANY_SECONDS * self._pace.stays_busy(message.load)
        if (due if message.outputs else due_alone) <= now:
            self._tell(message, message.load, now)
            return
        self._hold(message.load, due_alone)
        if (rest := replace(message, load=None)) != _NOTHING:
            super().deliver(rest)

    def close(self) -> None:
        """End the stream after what is already in it."""
        self._drop_held()
        super().close()

    def _tell(self, message: EngineOutputs, load: WorkerLoad, now: float) -> None:
        self._drop_held()
        self._pace.tell(load, now)
        changed, gone = self._changed_peers(load.peers)
        load = replace(load, peers=())
        super().deliver(replace(message, load=load, peers=changed, gone_peers=gone))

    def _changed_peers(
        self, peers: Sequence[PeerTransport]
    ) -> tuple[tuple[PeerTransport, ...], tuple[str, ...]]:
        """Find the peers that have changed, and the incarnations of those that are gone."""
        before, self._told_peers = self._told_peers, {peer.incarnation: peer for peer in peers}
        changed = tuple(peer for peer in peers if before.get(peer.incarnation) != peer)
        return changed, tuple(before.keys() - self._told_peers.keys())

    def _hold(self, load: WorkerLoad, due: float) -> None:
        """Hold a load until it is due alone, in place of one that is held already."""
        if due == math.inf:
            self._drop_held()
            return
        self._held = load
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._tell_held)

    def _tell_held(self) -> None:
        if self._held is not None:
            self._tell(_NOTHING, self._held, self._loop.time())

    def _drop_held(self) -> None:
        self._held = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refuse_others(one: WorkerLoad, other: WorkerLoad) -> bool:
    """Whether the loads differ in the peers that the worker refuses to read from."""
    if one.peers == other.peers:
        return False
    return one.refused_peers != other.refused_peers


def _matters(load: WorkerLoad, told: WorkerLoad) -> bool:
    """Whether the change is worth a slot, as every change of an idle worker is."""
    if load.is_idle or load.peers != told.peers:
        return True
    if _differ(load.waiting_requests, told.waiting_requests):
        return True
    if _differ(load.running_requests, told.running_requests):
        return True
    small = _SMALL * sum(pool.total * pool.page_size for pool in load.pools[:1])
    waiting = abs(load.waiting_tokens - told.waiting_tokens)
    return max(waiting, abs(load.room_tokens - told.room_tokens)) > small


def _differ(requests: int, told: int) -> bool:
    """Whether the counts differ by an eighth at least, which may change the choice of a worker."""
    return abs(requests - told) * 8 >= max(requests, told, 1)
