"""How the router learns which workers there are: `deploy` implements `Discovery`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.router.notifier import Notifier
from kvrelay.wire.worker_info import WorkerInfo


class Discovery(Protocol):
    """Lists the live workers. Used on the router's event loop only."""

    def endpoints(self) -> Sequence[WorkerInfo]:
        """The workers that are live now. Must not block."""
        ...

    def awaited(self) -> Sequence[WorkerInfo]:
        """The workers that are lost and will have successors, as they were. Must not block."""
        ...

    def successor(self) -> str:
        """``host:port`` of another cluster's controller, whose workers are to get new requests.

        Empty: there is none. Must not block.
        """
        ...

    async def changed(self) -> None:
        """Returns after the next change; registers before it first suspends."""
        ...


class StaticDiscovery:
    """Lists of workers that somebody replaces when they change."""

    def __init__(self, endpoints: Sequence[WorkerInfo] = ()) -> None:
        self._endpoints = tuple(endpoints)
        self._awaited: tuple[WorkerInfo, ...] = ()
        self._successor = ""
        self._changes = Notifier()

    def endpoints(self) -> Sequence[WorkerInfo]:
        """The list as last given."""
        return self._endpoints

    def awaited(self) -> Sequence[WorkerInfo]:
        """The list as last given."""
        return self._awaited

    def successor(self) -> str:
        """As last given."""
        return self._successor

    def shift_to(self, successor: str) -> None:
        """Names the successor and wakes those who wait in `changed`; call it on the event loop."""
        self._successor = successor
        self._changes.notify_all()

    def replace(self, endpoints: Sequence[WorkerInfo], awaited: Sequence[WorkerInfo] = ()) -> None:
        """Replaces the lists and wakes those who wait in `changed`; call it on the event loop."""
        self._endpoints, self._awaited = tuple(endpoints), tuple(awaited)
        self._changes.notify_all()

    async def changed(self) -> None:
        """Returns after the next `replace`."""
        await self._changes.wait()
