"""The copies of pages between the device's pools and the host's: their orders and their ends.

The engine thread orders a copy and goes on. A stream copies, in order, on a thread or a device
queue of its own. The end of the copy comes back to the engine thread as a message. Only the engine
thread decides what happens to the pages: the stream frees and publishes nothing.
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
    """Pages to copy. The caller keeps them unchanged until the end has come back."""

    operation: int
    """The number of the copy, which is unique."""
    to_host: bool
    """Whether from the device to the host, or else back."""
    device_pages: tuple[Pages, ...]
    """The device's pages, for each pool."""
    host_pages: tuple[Pages, ...]
    """The host's pages, for each pool as many as its `device_pages`. Windows' pools may have
    fewer."""

    @property
    def num_pages(self) -> int:
        """The number of pages of the pool that has most of them."""
        return max(map(len, self.host_pages))


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The end of a copy: no byte of it moves any more."""

    operation: int
    seconds: float
    """The time that it took by itself, without its wait for earlier ones."""
    error: str = ""
    """The reason why not all bytes are there; empty if they are."""


class CopyStream(Protocol):
    """An interface that copies in the order of its orders, away from the engine thread."""

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
