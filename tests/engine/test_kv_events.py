"""A real worker's KV events, as a subscriber that speaks vLLM's form reads them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from kvrelay.engine.worker import kv_events
from kvrelay.engine.worker.kv_events import KVEvents
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import PageHashes
from tests.net.zmq_subscriber import subscriber, until

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


@contextlib.asynccontextmanager
async def publishing(
    call_soon: Callable[..., object] | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[KVEvents, RadixTree, int]]:
    loop = asyncio.get_running_loop()
    events = KVEvents(PAGE_SIZE, "CPU", call_soon or loop.call_soon_threadsafe)
    log = PrefixLog(PageHashes(NO_MODEL, PAGE_SIZE), listener=events)
    try:
        port = await events.start(host)
        yield events, RadixTree(PAGE_SIZE, (None,), log=log), port
    finally:
        await events.close()


def insert(tree: RadixTree, tokens: list[int], namespace: str = "") -> None:
    pages = np.arange(len(tokens) // PAGE_SIZE, dtype=np.int32)
    tree.unlock(tree.insert(np.asarray(tokens, np.int32), [pages], namespace).lock)


def found(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)}


async def test_a_subscriber_knows_what_the_index_has_stored_and_removed() -> None:
    async with publishing() as (events, tree, port):
        insert(tree, [9] * 8)  # nobody listens yet
        followed = Followed()
        async with asyncio.timeout(60), subscriber(port, b"") as socket:
            await until(lambda: events.had_subscribers)
            first, second = [*range(1, 9), 1, 1, 1, 1], [*range(1, 9), 2, 2, 2, 2]

            async def heard(*prompts: list[int]) -> None:
                followed.take(await socket.recv_multipart())
                assert {*followed.blocks.values()} == set().union(*map(found, prompts))

            await asyncio.to_thread(insert, tree, first)
            await heard(first)
            insert(tree, second)
            await heard(first, second)
            insert(tree, first, "another tenant")
            await heard(first, second)
            assert len(followed.blocks) == 4 + 3
            tree.forget(np.asarray(second, np.int32), 8)
            followed.take(await socket.recv_multipart())
            assert len(followed.blocks) == 3 + 3
            tree.unlock(tree.match(np.asarray(first, np.int32)))
            tree.evict(0, 99)
            followed.blocks |= dict.fromkeys(_hashes([9] * 8), ())  # stored before it subscribed
            followed.take(await socket.recv_multipart())
            assert not followed.blocks


async def test_much_is_published_in_small_batches_in_turns_of_their_own() -> None:
    turns: list[Callable[[], object]] = []
    async with (
        publishing(turns.append) as (events, tree, port),
        asyncio.timeout(60),
        subscriber(port, b"") as socket,
    ):
        await until(lambda: events.had_subscribers)
        prompt = [*range(8_000)]
        insert(tree, prompt)
        for number in range(600):
            insert(tree, [number + 7] * PAGE_SIZE, "another tenant")
        followed, batches = Followed(), 0
        while turns:
            assert len(turns) == 1
            turns.pop()()
            message = await socket.recv_multipart()
            batch = msgpack.unpackb(message[2])[1]
            assert len(batch) <= 256
            assert sum(len(event["token_ids"]) for event in batch) <= 32 << 10
            followed.take(message)
            batches += 1
        assert batches > 3
        assert tuple(prompt) in followed.blocks.values()
        assert len(followed.blocks) == len(prompt) // PAGE_SIZE + 600


async def test_what_waits_is_bounded_by_its_bytes_and_what_is_dropped_shows_by_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "_MOST_WAITING_BYTES", 1 << 20)
    monkeypatch.setattr(kv_events, "_BATCH_BYTES", 1 << 18)
    turns: list[Callable[[], object]] = []
    async with (
        publishing(turns.append) as (events, tree, port),
        asyncio.timeout(60),
        subscriber(port, b"") as socket,
    ):
        await until(lambda: events.had_subscribers)
        prompt = [*range(40_000)]
        insert(tree, prompt)
        for index in range(4):
            insert(tree, prompt, f"tenant {index}")
        assert 1 << 19 < sum(one.num_bytes for one in events._waiting) <= 1 << 20
        turns.pop()()
        insert(tree, [5] * 8, "between")  # there is room, but the gap comes first
        numbers = [int.from_bytes((await socket.recv_multipart())[1])]
        while turns:
            turns.pop()()
            numbers.append(int.from_bytes((await socket.recv_multipart())[1]))
        assert numbers == [*range(len(numbers))]
        insert(tree, [6] * 8, "after")
        turns.pop()()
        message = await socket.recv_multipart()
        assert int.from_bytes(message[1]) == len(numbers) + 1
        assert msgpack.unpackb(message[2])[1][0]["token_ids"] == [6] * 8


async def test_what_is_stored_while_the_port_closes_is_published_to_nobody() -> None:
    loop, turns, errors = asyncio.get_running_loop(), list[Callable[[], object]](), list[object]()
    gc.collect()  # what earlier tests have left complains now, not below
    await asyncio.sleep(0)
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        async with (
            publishing(turns.append) as (events, tree, port),
            asyncio.timeout(60),
            subscriber(port, b""),
        ):
            await until(lambda: events.had_subscribers)
            insert(tree, [1] * 8)
        turns.pop()()
        insert(tree, [2] * 8)
        assert not turns
        gc.collect()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(None)
    assert not errors


async def test_a_host_that_other_machines_reach_is_refused() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1"):
        with pytest.raises(ValueError, match="--kv-events"):
            async with publishing(host=host):
                pass


def _hashes(tokens: list[int]) -> list[int]:
    hashes = PageHashes(NO_MODEL, PAGE_SIZE)
    pages = hashes.extend(hashes.root(""), np.asarray(tokens, "<i4").tobytes())
    return [int.from_bytes(pages[at : at + 8], "little") for at in range(0, len(pages), 32)]
