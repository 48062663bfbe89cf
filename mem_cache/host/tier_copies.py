"""Copies of pages between the device's pools and the host's: what is ordered, and what comes back.

The engine thread orders a copy and goes on; a stream copies, in order, on a thread or a device
queue of its own; its end comes back to the engine thread as a message. Only the engine thread
decides what becomes of the pages: the stream frees and publishes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.mem_cache.account import Pages
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.pool import KVPool


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Pages to copy. Who orders it keeps them as they are until its end has come back."""

    operation: int
    """Names it; no other ever has the same number."""
    to_host: bool
    """From the device to the host; else back."""
    device_pages: tuple[Pages, ...]
    """For each pool."""
    host_pages: tuple[Pages, ...]
    """For each pool; as many as its `device_pages`. Of windows' pools there may be fewer."""

    @property
    def num_pages(self) -> int:
        """Of the pool that has most of them."""
        return max(map(len, self.host_pages))


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A copy has ended: no byte of it moves any more."""

    operation: int
    seconds: float
    """That it took by itself, without its wait for earlier ones."""
    error: str = ""
    """Why not all bytes are there; empty if they are."""


class CopyStream(Protocol):
    """Copies in the order in which it is told to, away from the engine thread."""

    def start(self, moves: PageMoves) -> None:
        """Order a copy. Does not block; its `CopyEnded` comes later, once."""
        ...


def copy_moves(
    moves: PageMoves, device_pools: Sequence[KVPool], host_pools: Sequence[KVPool]
) -> None:
    """Make the copies on the calling thread. On a GPU's current stream they may still run."""
    pools = zip(device_pools, host_pools, moves.device_pages, moves.host_pages, strict=True)
    for device, host, here, there in pools:
        if not len(here):
            continue
        if moves.to_host:
            copy_pages(device, here, host, there)
        else:
            copy_pages(host, there, device, here)
