"""The store in which a controller keeps the records for its successor."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from kvrelay.deploy.bounded_waits import Pauses

T = TypeVar("T")
_log = logging.getLogger(__name__)


class KeyValueStore(Protocol):
    """A small store that outlives the controller's process. Every call may fail, or take long.

    Raises StoreError if the store cannot be reached.
    """

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        ...

    async def put_new(self, key: str, value: bytes) -> bool:
        """Set a key's value if it has none; return whether it had none. Atomic."""
        ...

    async def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        ...

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with the prefix."""
        ...


class StoreError(Exception):
    """The store did not answer."""


class InProcessStore:
    """A store that ends with its process, for a controller that also ends with it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""
        return self._values.get(key)

    async def put(self, key: str, value: bytes) -> None:
        """Set a key's value."""
        self._values[key] = value

    async def put_new(self, key: str, value: bytes) -> bool:
        """Set a key's value if it has none; return whether it had none."""
        if key in self._values:
            return False
        self._values[key] = value
        return True

    async def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._values.pop(key, None)

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with the prefix."""
        return [key for key in self._values if key.startswith(prefix)]


async def insisting(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call to the store until it answers; return the answer."""
    pauses = Pauses()
    while True:
        try:
            return await call()
        except StoreError as error:
            _log.warning("the store does not answer: %s", error)
            await pauses.pause()
