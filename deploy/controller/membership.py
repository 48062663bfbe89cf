"""Which incarnations of a cluster's workers live, drain or have died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvrelay.router.discovery import Discovery, StaticDiscovery
from kvrelay.wire.worker_info import WorkerInfo


class Membership:
    """Keeps the list that a router reads (`discovery`) in step with every change.

    A worker that drains stays in the list until its successor is live, so that the requests
    which nobody else can take know that there will be one. One that is lost is awaited until
    then, for the same reason. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._live: dict[str, WorkerInfo] = {}
        self._draining: dict[str, WorkerInfo] = {}
        self._awaited: dict[str, WorkerInfo] = {}
        self._running: dict[str, WorkerInfo] = {}
        """The latest incarnation of each worker, unless its process is known to have ended."""
        self._discovery = StaticDiscovery()

    @property
    def discovery(self) -> Discovery:
        """The workers that a router may use."""
        return self._discovery

    @property
    def live(self) -> Mapping[str, WorkerInfo]:
        """The live incarnations by worker name; a view that changes with them."""
        return MappingProxyType(self._live)

    def add_live(self, info: WorkerInfo) -> None:
        """An incarnation can be used; another one that drained has its successor.

        One that drains, and could not be reached for a while, drains still.
        """
        if self._draining.get(info.name) != info:
            self._draining.pop(info.name, None)
        self._awaited.pop(info.name, None)
        self._live[info.name] = self._running[info.name] = info
        self._publish()

    def remove_live(self, info: WorkerInfo) -> None:
        """An incarnation cannot be reached any more; its successor is awaited."""
        del self._live[info.name]
        self._awaited[info.name] = info
        self._publish()

    def is_draining(self, name: str) -> bool:
        """Whether the worker drains, or has drained and has no successor yet."""
        return name in self._draining

    def add_draining(self, info: WorkerInfo) -> None:
        """An incarnation takes no more requests."""
        self._draining[info.name] = info
        self._publish()

    def remove_awaited(self, info: WorkerInfo) -> None:
        """An incarnation that is lost will have no successor."""
        self._awaited.pop(info.name, None)
        self.remove_draining(info)
        self._publish()

    def remove_draining(self, info: WorkerInfo) -> None:
        """An incarnation does not drain after all."""
        if self._draining.get(info.name) == info:
            del self._draining[info.name]
            self._publish()

    def add_dead(self, info: WorkerInfo) -> None:
        """An incarnation's process has ended."""
        if self._running.get(info.name) == info:
            del self._running[info.name]
        self._publish()

    def clear(self) -> None:
        """No worker is left."""
        self._live.clear()
        self._awaited.clear()
        self._draining.clear()
        self._running.clear()
        self._publish()

    def shift_to(self, successor: str) -> None:
        """Routers are to send new requests to the workers of another cluster's controller."""
        self._discovery.shift_to(successor)

    async def changed(self) -> None:
        """Return after the next change, or `notify`; registers before it first suspends."""
        await self._discovery.changed()

    def notify(self) -> None:
        """Let those who wait for a change look again."""
        self._publish()

    async def until_dead(self, info: WorkerInfo) -> None:
        """Wait until the process of an incarnation that was live has ended."""
        while self._running.get(info.name) == info:
            await self.changed()

    async def until_live(self, name: str) -> WorkerInfo:
        """Wait until the worker has a live incarnation, which is returned."""
        while name not in self._live:
            await self.changed()
        return self._live[name]

    def _publish(self) -> None:
        listed = self._live | self._draining
        self._discovery.replace(
            [replace(listed[name], draining=name in self._draining) for name in sorted(listed)],
            [one for name, one in self._awaited.items() if name not in listed],
        )
