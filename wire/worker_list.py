"""The list of workers that a router may use, from the controller."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.wire.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerList:
    """All workers that exist, and all lost ones that will be replaced."""

    endpoints: tuple[WorkerInfo, ...] = ()
    """Workers that are live, or that drain without a successor."""
    awaited: tuple[WorkerInfo, ...] = ()
    """Lost workers that will have successors, as they were."""
    successor: str = ""
    """``host:port`` of another cluster's controller, whose workers are to get new requests."""
