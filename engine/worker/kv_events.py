"""The pages that the prefix index stores and removes, published in vLLM's form over ZeroMQ.

A message has three frames. They are the topic, which is empty, a number that counts messages from 0
(eight bytes, the highest first), and a batch in msgpack. The batch is ``[seconds since 1970,
events, None]``.

An event is a map::

    {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": ..., "token_ids": [...],
     "block_size": 16, "lora_id": None, "lora_name": None, "medium": "GPU"}
    {"type": "BlockRemoved", "block_hashes": [...], "medium": "GPU"}

A block is a page, and its hash the first eight bytes of the page's (`wire/page_hash.py`). There is
no replay: a subscriber that misses a number has missed its events.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack

from kvrelay.net.addresses import is_loopback
from kvrelay.net.zmq_publisher import ZmqPublisher
from kvrelay.wire.page_hash import HASH_BYTES

Event: TypeAlias = dict[str, Any]

_MOST_WAITING_BYTES: Final = 32 << 20
"""The most bytes of changes that wait to be published. More are dropped, which shows as a gap."""
_BATCH_CHANGES: Final = 256
_BATCH_BYTES: Final = 64 << 10
"""The most changes and bytes that one turn of the event loop packs: half a millisecond of its
time."""
_CHANGE_PAGES: Final = 256
_CHANGE_TOKENS: Final = 4096
"""The most pages and tokens of one change, unless a single page is larger; longer runs are
split."""
_CHANGE_BYTES: Final = 256
"""The bytes counted for a change besides its hashes and tokens."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A run of pages that are found from now on or, without tokens, no longer found."""

    hashes: bytes
    tokens: bytes = b""
    before: bytes | None = None
    """The hash of the page before; None: the run begins a prompt."""

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes while it waits."""
        return len(self.hashes) + len(self.tokens) + _CHANGE_BYTES


class KVEvents:
    """The events of one worker: taken on the engine's thread, published on the event loop.

    Args:
        page_size: tokens a page.
        medium: where the pages are, ``GPU`` or ``CPU``.
        call_soon: runs a function on the event loop, in its next turn; from any thread.
    """

    def __init__(self, page_size: int, medium: str, call_soon: Callable[..., object]) -> None:
        self._page_size = page_size
        self._change_pages = max(1, min(_CHANGE_PAGES, _CHANGE_TOKENS // page_size))
        self._medium = medium
        self._call_soon = call_soon
        self._publisher = ZmqPublisher()
        self._lock = threading.Lock()  # of all below but the number
        self._waiting: deque[_Change] = deque()
        self._waiting_bytes = 0
        self._lost = False  # until all before the gap is published
        self._is_due = False
        self._number = 0

    async def start(self, host: str) -> int:
        """Listen for subscribers. Returns the port.

        Raises:
            ValueError: other machines can reach the host.
            OSError: it cannot be listened on.
        """
        if not is_loopback(host):
            raise ValueError(
                f"--kv-events: {host} can be reached from other machines, and events have all "
                "prompts in plain text, for everybody"
            )
        return await self._publisher.start(host)

    async def close(self) -> None:
        """Close the port and every subscriber's connection."""
        await self._publisher.close()

    @property
    def had_subscribers(self) -> bool:
        """Whether anybody has subscribed since the start."""
        return self._publisher.had_subscribers

    # mem_cache's `PageListener`, on the engine's thread

    def stored(self, before: bytes | None, hashes: bytes, tokens: bytes) -> None:
        """Report pages that are found from now on."""
        if not self.had_subscribers:
            return
        page_bytes = self._page_size * 4
        for first, some in self._parts(hashes):
            start = first * page_bytes
            part = tokens[start : start + len(some) // HASH_BYTES * page_bytes]
            self._add(_Change(some, part, before))
            before = some[-HASH_BYTES:]

    def removed(self, hashes: bytes) -> None:
        """Report pages that are found no longer."""
        if not self.had_subscribers:
            return
        for _, some in self._parts(hashes):
            self._add(_Change(some))

    def _parts(self, hashes: bytes) -> Iterator[tuple[int, bytes]]:
        """Split hashes into runs of up to `_change_pages` pages, with each one's first place."""
        size = self._change_pages * HASH_BYTES
        for start in range(0, len(hashes), size):
            yield start // HASH_BYTES, hashes[start : start + size]

    def _add(self, change: _Change) -> None:
        with self._lock:
            if self._lost or self._waiting_bytes + change.num_bytes > _MOST_WAITING_BYTES:
                self._lost = True
                return
            self._waiting.append(change)
            self._waiting_bytes += change.num_bytes
            wakes, self._is_due = not self._is_due, True
        if wakes:
            self._call_soon(self._publish)

    # On the event loop

    def _publish(self) -> None:
        """Publish some of the waiting changes as one batch, and the rest in later turns."""
        changes, more, lost = self._take()
        batch = msgpack.packb([time.time(), [self._event(one) for one in changes], None])
        self._publisher.publish(self._number.to_bytes(8), batch)
        self._number += 2 if lost else 1
        if more:
            self._call_soon(self._publish)

    def _take(self) -> tuple[list[_Change], bool, bool]:
        """Take the next batch; also, whether more waits, and whether changes were lost after it."""
        changes: list[_Change] = []
        with self._lock:
            num_bytes = 0
            while self._waiting and len(changes) < _BATCH_CHANGES and num_bytes < _BATCH_BYTES:
                changes.append(self._waiting.popleft())
                num_bytes += changes[-1].num_bytes
            self._waiting_bytes -= num_bytes
            more = self._is_due = bool(self._waiting)
            lost = self._lost and not more
            self._lost = self._lost and more
        return changes, more, lost

    def _event(self, change: _Change) -> Event:
        hashes = _block_hashes(change.hashes)
        if not change.tokens:
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": self._medium}
        before = change.before
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if before is None else _block_hashes(before)[0],
            "token_ids": array("i", change.tokens).tolist(),
            "block_size": self._page_size,
            "lora_id": None,
            "lora_name": None,
            "medium": self._medium,
        }


def _block_hashes(hashes: bytes) -> list[int]:
    starts = range(0, len(hashes), HASH_BYTES)
    return [int.from_bytes(hashes[at : at + 8], "little") for at in starts]
