"""The engine thread's orders to a store, and the messages that come back.

The engine thread orders and goes on; another thread calls the store, and polls its operations to
their end. Only the engine thread decides what happens to pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvrelay.mem_cache.storage.storage_pages import StoragePage, StoreState


@dataclass(frozen=True, slots=True)
class LookUp:
    """An order to look up which of a prompt's pages are there."""

    operation: int
    """The number of the order, which is unique."""
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Fetch:
    """An order to bring pages to the host. The caller keeps their slots unchanged until its end."""

    operation: int
    pages: Sequence[StoragePage]


@dataclass(frozen=True, slots=True)
class Store:
    """An order to store pages of the host. The caller keeps them unchanged until its end."""

    operation: int
    pages: Sequence[StoragePage]


@dataclass(frozen=True, slots=True)
class Forget:
    """An order to drop these pages and their continuations."""

    operation: int
    keys: Sequence[bytes]


StorageOrder: TypeAlias = LookUp | Fetch | Store | Forget


@dataclass(frozen=True, slots=True)
class StorageEnded:
    """The end of an order: no byte of it moves any more."""

    operation: int
    found: Sequence[bytes]
    """The keys of the pages that are in the store, or that have come to the host."""
    seconds: float
    """The time that it took by itself, without its wait for earlier ones."""
    state: StoreState
    """The state of the store at that moment."""


class StorageStream(Protocol):
    """An interface that carries orders out, away from the engine thread; ends come in any order."""

    def start(self, order: StorageOrder) -> None:
        """Place an order. Does not block; its `StorageEnded` comes later, once."""
        ...
