"""One controller's leadership: its epoch is begun, and held until there is a later one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvrelay.deploy.controller.records.epoch import begin_epoch, hold_epoch, keep_epoch
from kvrelay.deploy.controller.records.key_value_store import KeyValueStore, insisting
from kvrelay.deploy.controller.records.leases import Leases, LeaseTimes
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker_lease import lease_clock

_log = logging.getLogger(__name__)


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
