"""The workers of a cluster, or of the cluster that its controller names as its successor."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.remote_discovery import RemoteDiscovery
from kvrelay.wire.version import VERSION
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_log = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 5.0
"""Seconds before a successor that has refused this router is asked again."""
_FORGET_SECONDS: Final = 300.0
"""Seconds of a controller's silence after which its workers have ended: their leases are over."""


@dataclass(eq=False)
class _Followed:
    """A controller whose list of workers this router follows."""

    address: str
    """The address by which its predecessor names it; empty: the first one."""
    discovery: RemoteDiscovery
    stop: AsyncExitStack = field(default_factory=AsyncExitStack)
    """The exit stack that ends the subscription to it."""
    takes_over: bool = False
    """Whether its workers get new requests, unless those of a successor do."""
    complained: str = ""

    def listen_by(self, listening: Coroutine[Any, Any, None]) -> None:
        """Run this subscription until `stop`."""
        task = asyncio.create_task(listening)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.stop.push_async_callback(end)

    @property
    def listed(self) -> list[WorkerInfo]:
        """The controller's workers, with those that are lost and will have successors."""
        return [*self.discovery.endpoints(), *self.discovery.awaited()]


class ShiftingDiscovery(StaticDiscovery):
    """The workers of one cluster for new requests, and of its predecessors for running ones.

    The workers of a cluster that has a successor are listed as draining as soon as the successor's
    cluster can serve. It can with workers of this version that have loaded the same model. Until
    then nothing changes. After the shift, only the predecessor's controller can take it back.

    It has no successor itself: no router follows this list.

    Args:
        first: the controller that this router was started with.
        make: makes a discovery that follows the controller at an address.
    """

    def __init__(self, first: RemoteDiscovery, make: Callable[[str], RemoteDiscovery]) -> None:
        super().__init__()
        self._make = make
        self._followed = [_Followed("", first, takes_over=True)]
        self._dropped: list[_Followed] = []
        """The controllers that need not be followed any more."""
        self.metrics_address = ""
        """The address of this router's metrics, ``host:port``; set before `following`."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the controllers while the context lasts; the context begins once there is a list.

        Raises StartError if the first one refuses this router.
        """
        [first] = self._followed
        first.discovery.metrics_address = self.metrics_address
        await first.stop.enter_async_context(first.discovery.following())
        self._update()
        keeping = asyncio.create_task(self._keep())
        keeping.add_done_callback(_log_failure)
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            for one in [*self._followed, *self._dropped]:
                await one.stop.aclose()

    async def _keep(self) -> None:
        while True:
            changes = [asyncio.create_task(one.discovery.changed()) for one in self._followed]
            try:
                await asyncio.sleep(0)  # they are registered now
                before = [*self._followed]
                self._follow_successors()
                if self._followed != before:
                    continue  # waits for changes of those, too
                self._update()
                while self._dropped:
                    await self._dropped[-1].stop.aclose()
                    self._dropped.pop()
                forget = None if len(self._followed) == 1 else _AGAIN_SECONDS
                await asyncio.wait(changes, timeout=forget, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()

    def _follow_successors(self) -> None:
        """Follow each successor that is named, and no others."""
        chain = self._followed
        while len(chain) > 1 and chain[1].takes_over and _has_ended(chain[0].discovery):
            self._dropped.append(chain.pop(0))
        for place, one in enumerate(chain):
            successor = one.discovery.successor()
            if successor in [other.address for other in chain[: place + 1]]:
                successor = ""  # they name each other
            if place + 1 < len(chain) and chain[place + 1].address != successor:
                self._dropped += chain[place + 1 :]
                del chain[place + 1 :]
            if successor and place + 1 == len(chain):
                new = _Followed(successor, self._make(successor))
                new.listen_by(self._listen(new))
                chain.append(new)

    async def _listen(self, successor: _Followed) -> None:
        while True:
            try:
                async with successor.discovery.following():
                    await asyncio.Event().wait()
            except StartError as error:
                _complain(successor, str(error))
            await asyncio.sleep(_AGAIN_SECONDS)

    def _update(self) -> None:
        """Decide whose workers get new requests, and tell all controllers."""
        chain = self._followed
        for before, one in itertools.pairwise(chain):
            if before.takes_over and not one.takes_over and _can_take_over(one, before.listed):
                one.takes_over = True
                _log.warning("new requests go to the workers of %s", one.address)
        last = max(place for place, one in enumerate(chain) if one.takes_over)
        for place, one in enumerate(chain):
            shifted_to = chain[place + 1].address if place < last else ""
            metrics = self.metrics_address if place == last else ""
            one.discovery.say(metrics_address=metrics, shifted_to=shifted_to)
        endpoints = [*chain[last].discovery.endpoints()]
        listed = {worker.incarnation for worker in endpoints}
        endpoints += [
            replace(worker, draining=True)
            for one in chain[:last]
            for worker in one.discovery.endpoints()
            if worker.incarnation not in listed
        ]
        awaited = chain[last].discovery.awaited()
        if (endpoints, [*awaited]) != ([*self.endpoints()], [*self.awaited()]):
            self.replace(endpoints, awaited)


def _log_failure(keeping: asyncio.Task[None]) -> None:
    if not keeping.cancelled() and (error := keeping.exception()) is not None:
        _log.critical("the router no longer follows the controller", exc_info=error)


def _has_ended(discovery: RemoteDiscovery) -> bool:
    silent_since = discovery.silent_since
    if silent_since is None:
        return False
    return not discovery.endpoints() or time.monotonic() - silent_since > _FORGET_SECONDS


def _can_take_over(successor: _Followed, before: Sequence[WorkerInfo]) -> bool:
    """Whether a cluster's workers can serve the models of the cluster before it."""
    models = {one.model for one in before}
    fit = []
    for one in successor.listed:
        if one.version != VERSION:
            _complain(successor, f"{one.incarnation} is of {one.version}, this router of {VERSION}")
        elif models and one.model not in models:
            _complain(successor, f"{one.incarnation} has loaded another model, {one.model.name}")
        elif not one.draining:
            fit.append(one.role)
    pair = {WorkerRole.PREFILL, WorkerRole.DECODE}
    return WorkerRole.AGGREGATED in fit or pair <= set(fit)


def _complain(successor: _Followed, why: str) -> None:
    """Log once why new requests do not go there."""
    if why != successor.complained:
        successor.complained = why
        _log.error("no requests go to the workers of %s: %s", successor.address, why)
