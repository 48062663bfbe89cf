"""A controller's epoch: the store tells which controller is the latest one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvrelay.deploy.controller.records.key_value_store import KeyValueStore, StoreError
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.engine.worker.worker_lease import boottime

_log = logging.getLogger(__name__)
_PREFIX: Final = "epoch/"
_LOOKS: Final = 3
"""The number of looks at the store in the time that a controller's lease lasts."""


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
