"""Publishes what the prefix index stores and removes, in vLLM's form, over ZeroMQ.

A message has three frames: the topic, which is empty, a number that counts messages from 0
(eight bytes, the highest first), and a batch in msgpack: ``[seconds since 1970, events, None]``. An
event is a map::

    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
     "block_size": 16, "lora_id": None, "lora_name": None, "medium": "GPU"}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}

A block is a page, and its hash the first eight bytes of the page's (`wire/page_hash.py`). There is
no replay: whoever misses a number has missed what it said.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgpack

from kvrelay.net.zmq_publisher import ZmqPublisher
from kvrelay.wire.page_hash import HASH_BYTES

Event: TypeAlias = dict[str, Any]

_MOST_WAITING = 1 << 16
"""Events that the event loop has not published yet; more are dropped, which shows by a gap."""


class KVEvents:
    """Takes events on the engine's thread and publishes them, in batches, on the event loop.

    Args:
        page_size: tokens a page.
        medium: where the pages are, ``GPU`` or ``CPU``.
        call_soon: runs a function on the event loop, soon; from any thread.
    """

    def __init__(self, page_size: int, medium: str, call_soon: Callable[..., object]) -> None:
        self._page_size = page_size
        self._medium = medium
        self._call_soon = call_soon
        self._publisher = ZmqPublisher()
        self._waiting: deque[Event] = deque()
        self._number = 0
        self._lost = False

    async def start(self, host: str) -> int:
        """Listen for subscribers; returns the port."""
        return await self._publisher.start(host)

    async def close(self) -> None:
        """Close the port and every subscriber's connection."""
        await self._publisher.close()

    @property
    def num_subscribers(self) -> int:
        """Who is connected now."""
        return self._publisher.num_subscribers

    # mem_cache's `PageListener`, on the engine's thread

    def stored(self, before: bytes | None, hashes: bytes, tokens: bytes) -> None:
        """These pages are found from now on."""
        if not self.num_subscribers:
            return
        self._add(
            {
                "type": "BlockStored",
                "block_hashes": _block_hashes(hashes),
                "parent_block_hash": None if before is None else _block_hashes(before)[0],
                "token_ids": array("i", tokens).tolist(),
                "block_size": self._page_size,
                "lora_id": None,
                "lora_name": None,
                "medium": self._medium,
            }
        )

    def removed(self, hashes: bytes) -> None:
        """These pages are found no more."""
        if not self.num_subscribers:
            return
        self._add(
            {
                "type": "BlockRemoved",
                "block_hashes": _block_hashes(hashes),
                "medium": self._medium,
            }
        )

    def _add(self, event: Event) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._lost = True
            return
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self._call_soon(self._publish)

    # On the event loop

    def _publish(self) -> None:
        """Publish what waits, as one batch."""
        events = []
        while self._waiting:
            events.append(self._waiting.popleft())
        if events:
            batch = msgpack.packb([time.time(), events, None])
            self._publisher.publish((b"", self._number.to_bytes(8), batch))
            self._number += 1
        if self._lost:
            self._lost, self._number = False, self._number + 1


def _block_hashes(hashes: bytes) -> list[int]:
    starts = range(0, len(hashes), HASH_BYTES)
    return [int.from_bytes(hashes[at : at + 8], "little") for at in starts]
