"""What the engine thread orders of a store, and what comes back as messages.

The engine thread orders and goes on; another thread calls the store, and polls its operations to
their end. Only the engine thread decides what becomes of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvrelay.mem_cache.storage.storage_pages import StoragePage, StoreState


@dataclass(frozen=True, slots=True)
class LookUp:
    """Say which of a prompt's pages are there."""

    operation: int
    """Names it; no other order ever has the same number."""
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring pages to the host. Who orders it keeps their slots as they are until the end."""

    operation: int
    pages: Sequence[StoragePage]


@dataclass(frozen=True, slots=True)
class Store:
    """Keep pages of the host. Who orders it keeps them as they are until the end."""

    operation: int
    pages: Sequence[StoragePage]


@dataclass(frozen=True, slots=True)
class Forget:
    """Keep neither these pages nor what continues them."""

    operation: int
    keys: Sequence[bytes]


StorageOrder: TypeAlias = LookUp | Fetch | Store | Forget


@dataclass(frozen=True, slots=True)
class StorageEnded:
    """What was ordered has ended: no byte of it moves any more."""

    operation: int
    found: Sequence[bytes]
    """The keys of the pages that are in the store, or that have come to the host."""
    seconds: float
    """That it took by itself, without its wait for earlier ones."""
    state: StoreState
    """Of the store, at that moment."""


class StorageStream(Protocol):
    """Carries orders out, away from the engine thread. What comes back is not in their order."""

    def start(self, order: StorageOrder) -> None:
        """Order something. Does not block; its `StorageEnded` comes later, once."""
        ...
