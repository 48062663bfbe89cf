"""One controller's leadership: its epoch is begun, and held until there is a later one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvrelay.deploy.controller.records.key_value_store import KeyValueStore, StoreError, insisting
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker_lease import boottime, lease_clock

_log = logging.getLogger(__name__)
_PREFIX: Final = "epoch/"
_LOOKS: Final = 3
"""The number of looks at the store in the time that a controller's lease lasts."""


class Leadership:
    """A controller's leadership of its cluster: it begins an epoch and holds it.

    An instance belongs to one event loop.

    Args:
        store: says which controller is the latest one.
        on_deposed: is called when a later controller has begun.
        on_broken: is called when an unexpected error has ended the renewal.
    """

    def __init__(
        self,
        store: KeyValueStore,
        on_deposed: Callable[[], object],
        on_broken: Callable[[], object],
    ) -> None:
        self._store = store
        self._on_deposed = on_deposed
        self._on_broken = on_broken
        self._holding: asyncio.Task[None] | None = None

    async def begin(self, configs: Sequence[WorkerConfig], own_seconds: float) -> Leases:
        """Begin an epoch and hold it from now on; return the leases that it may give.

        Args:
            configs: the workers' configurations, which say how long their leases last.
            own_seconds: the duration of the controller's own lease.
        """
        longest = max((config.lease_seconds for config in configs), default=0.0)
        alone = any(config.suspended_alone for config in configs)
        clock = lease_clock(suspended_alone=alone)
        leases = await begin_epoch(self._store, LeaseTimes(longest, own_seconds), clock)
        self._holding = asyncio.create_task(self._hold(leases, clock))
        self._holding.add_done_callback(self._holding_ended)
        return leases

    async def is_latest(self, leases: Leases) -> bool:
        """Ask the store, until it answers, whether no later controller has begun.

        Args:
            leases: the leases that `begin` has returned.
        """
        return await insisting(lambda: hold_epoch(leases, self._store, leases.clock))

    def end(self) -> None:
        """Stop holding the epoch."""
        if self._holding is not None:
            self._holding.cancel()

    async def _hold(self, leases: Leases, clock: Callable[[], float]) -> None:
        await keep_epoch(leases, self._store, clock)
        self._on_deposed()

    def _holding_ended(self, holding: asyncio.Task[None]) -> None:
        if not holding.cancelled() and (error := holding.exception()) is not None:
            _log.critical("the controller no longer renews its lease", exc_info=error)
            self._on_broken()


async def begin_epoch(
    store: KeyValueStore, times: LeaseTimes, clock: Callable[[], float] = boottime
) -> Leases:
    """Become the controller, with a greater epoch than all before.

    Earlier controllers can renew no lease once their own is over. Raises StoreError.
    """
    while True:
        epoch = await _latest(store) + 1
        if await store.put_new(f"{_PREFIX}{epoch}", b""):
            break
    leases = Leases(epoch, times, began=clock(), clock=clock)
    await hold_epoch(leases, store, clock)
    await _forget_earlier(store, epoch)
    return leases


async def keep_epoch(
    leases: Leases, store: KeyValueStore, clock: Callable[[], float] = boottime
) -> None:
    """Hold the controller's lease until there is a later controller; then return.

    While the store does not answer, the lease runs out: nothing is renewed until it answers.
    """
    while True:
        await asyncio.sleep(leases.times.controller_seconds / _LOOKS)
        try:
            if not await hold_epoch(leases, store, clock):
                return
        except StoreError as error:
            _log.warning("the store does not say who the controller is: %s", error)


async def hold_epoch(
    leases: Leases, store: KeyValueStore, clock: Callable[[], float] = boottime
) -> bool:
    """Ask the store whether this is still the latest controller: hold its lease, or give up.

    Raises StoreError.
    """
    asked_at = clock()
    if await _latest(store) > leases.epoch:
        leases.give_up()
        return False
    leases.hold(asked_at)
    return True


async def _latest(store: KeyValueStore) -> int:
    """Return the greatest epoch that has begun; 0: none has."""
    epochs = [int(key.removeprefix(_PREFIX)) for key in await store.keys(_PREFIX)]
    return max(epochs, default=0)


async def _forget_earlier(store: KeyValueStore, epoch: int) -> None:
    for key in await store.keys(_PREFIX):
        if int(key.removeprefix(_PREFIX)) < epoch:
            await store.delete(key)
