"""A real worker's KV events, as a subscriber that speaks vLLM's form reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import numpy as np

from kvrelay.engine.worker.kv_events import KVEvents
from kvrelay.mem_cache.prefix_log import PrefixLog
from kvrelay.mem_cache.radix_tree import RadixTree
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes
from tests.net.test_zmq_publisher import Subscriber, until

PAGE_SIZE = 4


class Followed:
    """The blocks that a subscriber knows, each by its tokens from the start of the prompt."""

    def __init__(self, page_size: int = PAGE_SIZE) -> None:
        self.page_size = page_size
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.next_number: int | None = None

    def take(self, message: list[bytes]) -> None:
        topic, number, batch = message
        assert topic == b""
        got = int.from_bytes(number)
        assert self.next_number in (None, got)
        self.next_number = got + 1
        seconds, events, rank = msgpack.unpackb(batch)
        assert seconds > 1.7e9
        assert rank is None
        for event in events:
            self._take_event(event)

    def _take_event(self, event: dict[str, Any]) -> None:
        assert event["medium"] == "CPU"
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.blocks[block]
            return
        assert event["type"] == "BlockStored"
        assert event["block_size"] == self.page_size
        assert event["lora_id"] is None
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        before = () if parent is None else self.blocks[parent]
        for index, block in enumerate(event["block_hashes"]):
            before += tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            self.blocks[block] = before
        assert len(tokens) == self.page_size * len(event["block_hashes"])


def insert(tree: RadixTree, tokens: list[int], namespace: str = "") -> None:
    pages = np.arange(len(tokens) // PAGE_SIZE, dtype=np.int32)
    tree.unlock(tree.insert(np.asarray(tokens, np.int32), [pages], namespace).lock)


def found(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)}


async def test_a_subscriber_knows_what_the_index_has_stored_and_removed() -> None:
    loop = asyncio.get_running_loop()
    events = KVEvents(PAGE_SIZE, "CPU", loop.call_soon_threadsafe)
    port = await events.start("127.0.0.1")
    log = PrefixLog(PageHashes(NO_MODEL, PAGE_SIZE), listener=events)
    tree = RadixTree(PAGE_SIZE, (None,), log=log)
    insert(tree, [9] * 8)  # nobody listens yet
    subscriber, followed = await Subscriber.connect(port, b""), Followed()
    await until(lambda: events.num_subscribers == 1)
    await until(lambda: any(events._publisher._topics.values()))
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2, 2]

    async def heard(*prompts: list[int]) -> None:
        followed.take(await asyncio.wait_for(subscriber.message(), 10))
        assert {*followed.blocks.values()} == set().union(*map(found, prompts))

    await asyncio.to_thread(insert, tree, first)
    await heard(first)
    insert(tree, second)
    await heard(first, second)
    insert(tree, first, "another tenant")
    await heard(first, second)
    assert len(followed.blocks) == 4 + 3
    tree.forget(np.asarray(second, np.int32), 8)
    followed.take(await asyncio.wait_for(subscriber.message(), 10))
    assert len(followed.blocks) == 3 + 3
    tree.unlock(tree.match(np.asarray(first, np.int32)))
    tree.evict(0, 99)
    followed.blocks |= dict.fromkeys(_hashes([9] * 8), ())  # stored before it subscribed
    followed.take(await asyncio.wait_for(subscriber.message(), 10))
    assert not followed.blocks
    subscriber.writer.close()
    await subscriber.writer.wait_closed()
    await events.close()


def _hashes(tokens: list[int]) -> list[int]:
    hashes = PageHashes(NO_MODEL, PAGE_SIZE)
    pages = hashes.extend(hashes.root(""), np.asarray(tokens, "<i4").tobytes())
    return [int.from_bytes(pages[at : at + 8], "little") for at in range(0, len(pages), 32)]
