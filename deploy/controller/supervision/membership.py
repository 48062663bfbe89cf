"""The incarnations of a cluster's workers: those that live, drain or have died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvrelay.router.discovery import StaticDiscovery
from kvrelay.wire.worker_info import WorkerInfo


class Membership:
    """The list that a router reads (`discovery`), kept in step with every change.

    A worker that drains stays in the list until its successor is live. So requests that no other
    worker can take know that there will be one. A lost worker is listed as awaited until then, for
    the same reason. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._live: dict[str, WorkerInfo] = {}
        self._draining: dict[str, WorkerInfo] = {}
        self._awaited: dict[str, WorkerInfo] = {}
        self._running: dict[str, WorkerInfo] = {}
        """The latest incarnation of each worker, unless its process is known to have ended."""
        self._ends: dict[str, str] = {}
        self.discovery = StaticDiscovery()
        """The workers that a router may use. Its `changed` returns after the next `publish`."""
        self.live: Mapping[str, WorkerInfo] = MappingProxyType(self._live)
        """The live incarnations by worker name; a view that changes with them."""

    def add_live(self, info: WorkerInfo) -> None:
        """Add an incarnation that can be used; its predecessor, if that drained, is replaced.

        An incarnation that drains, and was unreachable for a while, still drains.
        """
        if self._draining.get(info.name) != info:
            self._draining.pop(info.name, None)
        self._awaited.pop(info.name, None)
        self._live[info.name] = self._running[info.name] = info
        self.publish()

    def remove_live(self, info: WorkerInfo) -> None:
        """Remove an incarnation that cannot be reached any more, and await its successor."""
        del self._live[info.name]
        self._awaited[info.name] = info
        self.publish()

    def is_draining(self, name: str) -> bool:
        """Return whether the worker drains, or has drained and has no successor yet."""
        return name in self._draining

    def add_draining(self, info: WorkerInfo) -> None:
        """Mark an incarnation that takes no more requests."""
        self._draining[info.name] = info
        self.publish()

    def remove_awaited(self, info: WorkerInfo) -> None:
        """Stop awaiting the successor of a lost incarnation."""
        self._awaited.pop(info.name, None)
        self.remove_draining(info)
        self.publish()

    def remove_draining(self, info: WorkerInfo) -> None:
        """Unmark an incarnation that does not drain after all."""
        if self._draining.get(info.name) == info:
            del self._draining[info.name]
            self.publish()

    def add_dead(self, info: WorkerInfo) -> None:
        """Note that an incarnation's process has ended."""
        if self._running.get(info.name) == info:
            del self._running[info.name]
        self.publish()

    def note_end(self, name: str, why: str) -> None:
        """Note why a worker's latest incarnation has died."""
        self._ends[name] = why

    def last_end(self, name: str) -> str:
        """Return why a worker's latest incarnation that died did so; empty: none has."""
        return self._ends.get(name, "")

    def clear(self) -> None:
        """Forget all workers, when none is left."""
        self._live.clear()
        self._awaited.clear()
        self._draining.clear()
        self._running.clear()
        self.publish()

    async def until_dead(self, info: WorkerInfo) -> None:
        """Wait until the process of an incarnation that was live has ended."""
        while self._running.get(info.name) == info:
            await self.discovery.changed()

    async def until_live(self, name: str) -> WorkerInfo:
        """Wait until the worker has a live incarnation, and return it."""
        while name not in self._live:
            await self.discovery.changed()
        return self._live[name]

    def publish(self) -> None:
        """List all workers as they are now, and let tasks that wait for a change look again."""
        listed = self._live | self._draining
        self.discovery.replace(
            [replace(listed[name], draining=name in self._draining) for name in sorted(listed)],
            [one for name, one in self._awaited.items() if name not in listed],
        )
