"""The router's source of the list of workers: `deploy` implements `Discovery`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.router.notifier import Notifier
from kvrelay.wire.worker_info import WorkerInfo


class Discovery(Protocol):
    """The list of live workers. Used on the router's event loop only."""

    def endpoints(self) -> Sequence[WorkerInfo]:
        """The workers that are live now. Must not block."""
        ...

    def awaited(self) -> Sequence[WorkerInfo]:
        """The workers that are lost and will have successors, as they were. Must not block."""
        ...

    def successor(self) -> str:
        """The address, ``host:port``, of another cluster's controller, to shift new requests to.

        Empty: there is none. Must not block.
        """
        ...

    async def changed(self) -> None:
        """Return after the next change; register before the first suspension."""
        ...


class StaticDiscovery:
    """Lists of workers that their owner, or a subclass, replaces when they change."""

    def __init__(self, endpoints: Sequence[WorkerInfo] = ()) -> None:
        self._endpoints = tuple(endpoints)
        self._awaited: tuple[WorkerInfo, ...] = ()
        self._successor = ""
        self._changes = Notifier()

    def endpoints(self) -> Sequence[WorkerInfo]:
        """The latest given list."""
        return self._endpoints

    def awaited(self) -> Sequence[WorkerInfo]:
        """The latest given list."""
        return self._awaited

    def successor(self) -> str:
        """The latest given successor."""
        return self._successor

    def shift_to(self, successor: str) -> None:
        """Set the successor and wake the waiters in `changed`; call it on the event loop."""
        self._successor = successor
        self._changes.notify_all()

    def replace(self, endpoints: Sequence[WorkerInfo], awaited: Sequence[WorkerInfo] = ()) -> None:
        """Replace the lists and wake the waiters in `changed`; call it on the event loop."""
        self._endpoints, self._awaited = tuple(endpoints), tuple(awaited)
        self._changes.notify_all()

    async def changed(self) -> None:
        """Return after the next `replace` or `shift_to`."""
        await self._changes.wait()
