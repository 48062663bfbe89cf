"""Which workers a router may use, as the controller says it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.wire.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerList:
    """All workers that there are, and those that there will be again."""

    endpoints: tuple[WorkerInfo, ...] = ()
    """Live, or draining without a successor."""
    awaited: tuple[WorkerInfo, ...] = ()
    """Lost; they will have successors. As they were."""
    successor: str = ""
    """``host:port`` of the controller of another cluster, whose workers are to get new requests."""
