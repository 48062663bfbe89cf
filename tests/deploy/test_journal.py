"""What a successor reads of what controllers before it have written, in any order of events."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.deploy.controller.records.journal import Journal
from kvrelay.deploy.controller.records.key_value_store import InProcessStore, StoreError
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.ordered_changes import Changes, Replacement, Revision, Roll
from kvrelay.deploy.controller.records.records import (
    VERSION,
    ClusterPhase,
    ClusterRecord,
    Records,
    WorkerRecord,
)
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.started_worker import ActorPlace, Started
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.wire.worker_info import WorkerRole
from tests.deploy.test_incarnation import INFO
from tests.deploy.test_leases import TIMES

D = WorkerRole.DECODE
PLANNED = WorkerRecord("decode-0", D)
STARTED = WorkerRecord(
    "decode-0",
    D,
    ActorPlace("group", 3),
    Started(INFO, ProcessIdentity("boot", "pid:[1]", 7, 8), "10.0.0.1"),
    draining=True,
    removing=True,
)


def leases_of(epoch: int, now: float = 0.0) -> Leases:
    return Leases(epoch, TIMES, began=0.0, clock=lambda: now)


async def take_over(store: InProcessStore, epoch: int) -> tuple[Journal, Records | None]:
    return await Journal.take_over(store, leases_of(epoch))


def test_records_are_read_as_they_were_written():
    for record in (PLANNED, STARTED, replace(PLANNED, revision=Revision(3, {"threads": "7"}))):
        assert WorkerRecord.from_bytes(record.to_bytes()) == record
    change = Changes((("decode-1", D),), ("prefill-1",))
    left = (Replacement(D, "decode-0", "decode-1"),)
    roll = Roll(Revision(2, {"chunk_tokens": "7"}), left, 2, 1, 0, {D: 2}, "no room")
    rolled = ClusterRecord(revision=Revision(1), previous=Revision(), roll=roll)
    serving = ClusterRecord(ClusterPhase.SERVING, frozenset({"a", "b"}), change)
    for cluster in (ClusterRecord(), serving, rolled):
        assert ClusterRecord.from_bytes(cluster.to_bytes()) == cluster


def test_records_of_another_version_are_refused():
    text = PLANNED.to_bytes().replace(b'"version": %d' % VERSION, b'"version": 0')
    with pytest.raises(ClusterError, match="another version of kvrelay"):
        WorkerRecord.from_bytes(text)


async def test_a_successor_has_all_that_was_written_and_nothing_that_was_struck_out():
    store = InProcessStore()
    first, before = await take_over(store, 1)
    assert before is None
    await first.write_cluster(phase=ClusterPhase.SERVING)
    await first.add_worker(PLANNED)
    await first.add_worker(replace(PLANNED, name="decode-1"))
    await first.write_worker("decode-0", place=STARTED.place, started=STARTED.started)
    await first.remove_worker("decode-1")
    await first.add_death("decode-9-1")
    await first.add_death("decode-9-2")
    await first.remove_death("decode-9-1")
    second, before = await take_over(store, 2)
    workers = {"decode-0": replace(STARTED, draining=False, removing=False)}
    expected = Records(ClusterRecord(ClusterPhase.SERVING), workers, frozenset({"decode-9-2"}))
    assert before == expected
    assert (second.cluster, second.workers) == (expected.cluster, expected.workers)
    assert not [key for key in await store.keys("") if key.startswith("records/1/")]
    assert (await take_over(store, 3))[1] == expected


async def test_what_a_predecessor_writes_later_is_read_by_nobody():
    store = InProcessStore()
    first, _ = await take_over(store, 1)
    await first.add_worker(PLANNED)
    await take_over(store, 2)
    await first.add_worker(replace(PLANNED, name="decode-7"))
    await first.add_worker(STARTED)
    await first.remove_worker("decode-0")
    _, before = await take_over(store, 3)
    assert before is not None
    assert before.workers == {"decode-0": PLANNED}


class FailingStore(InProcessStore):
    """Answers so many calls that change it, and then none that anybody waits for."""

    left = 1000

    async def put(self, key: str, value: bytes) -> None:
        if not self.left:
            raise StoreError("it is away")
        self.left -= 1
        await super().put(key, value)


async def test_a_successor_that_dies_while_it_copies_changes_nothing():
    store = FailingStore()
    first, _ = await take_over(store, 1)
    await first.write_cluster(phase=ClusterPhase.SERVING)
    for number in range(3):
        await first.add_worker(replace(PLANNED, name=f"decode-{number}"))
    for copied in range(4):
        store.left = copied
        dying = asyncio.create_task(take_over(store, 2 + copied))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not store.left
        assert not dying.done()
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    store.left = 1000
    _, before = await take_over(store, 9)
    assert before is not None
    assert len(before.workers) == 3
    assert before.cluster.phase is ClusterPhase.SERVING


async def test_who_does_not_hold_the_controllers_lease_writes_nothing():
    store = InProcessStore()
    now = 0.0
    leases = Leases(1, TIMES, began=0.0, clock=lambda: now)
    journal, _ = await Journal.take_over(store, leases)
    now = TIMES.controller_seconds
    writing = asyncio.create_task(journal.add_worker(PLANNED))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not await store.keys("records/1/worker/")
    leases.hold(now)
    await writing
    assert await store.keys("records/1/worker/") == ["records/1/worker/decode-0"]


class OnceFailingStore(InProcessStore):
    """The first call that changes a key with this in its name fails."""

    fails_at = ""

    def _fail_once(self, key: str) -> None:
        if self.fails_at and self.fails_at in key:
            self.fails_at = ""
            raise StoreError("it is away")

    async def put(self, key: str, value: bytes) -> None:
        self._fail_once(key)
        await super().put(key, value)

    async def delete(self, key: str) -> None:
        self._fail_once(key)
        await super().delete(key)


async def assert_successor_reads(journal: Journal, store: InProcessStore) -> None:
    _, before = await take_over(store, 2)
    assert before is not None
    assert (before.cluster, before.workers) == (journal.cluster, journal.workers)


async def test_of_two_writers_of_one_record_the_later_one_wins_though_the_first_tries_again():
    store = OnceFailingStore()
    journal, _ = await take_over(store, 1)
    await journal.add_worker(PLANNED)
    store.fails_at = "worker/decode-0"
    await asyncio.gather(
        journal.write_worker("decode-0", place=STARTED.place),
        journal.write_worker("decode-0", started=STARTED.started),
    )
    assert journal.workers["decode-0"] == replace(STARTED, draining=False, removing=False)
    await assert_successor_reads(journal, store)


async def test_no_record_is_left_of_a_worker_that_is_removed_while_it_is_written():
    store = OnceFailingStore()
    journal, _ = await take_over(store, 1)
    await journal.add_worker(PLANNED)
    store.fails_at = "worker/decode-0"
    await asyncio.gather(
        journal.write_worker("decode-0", draining=True), journal.remove_worker("decode-0")
    )
    assert not journal.workers
    await assert_successor_reads(journal, store)


async def test_a_worker_that_is_added_while_its_removal_is_tried_again_is_kept():
    store = OnceFailingStore()
    journal, _ = await take_over(store, 1)
    await journal.add_worker(PLANNED)
    store.fails_at = "worker/decode-0"
    await asyncio.gather(journal.remove_worker("decode-0"), journal.add_worker(STARTED))
    assert journal.workers == {"decode-0": STARTED}
    await assert_successor_reads(journal, store)


async def test_two_names_that_are_added_side_by_side_are_both_kept():
    store = OnceFailingStore()
    journal, _ = await take_over(store, 1)
    store.fails_at = "cluster"

    async def add(name: str) -> None:
        await journal.write_cluster(names=journal.cluster.names | {name})

    await asyncio.gather(add("decode-1"), add("decode-2"))
    assert journal.cluster.names == {"decode-1", "decode-2"}
    await assert_successor_reads(journal, store)


async def test_a_death_that_is_struck_out_while_it_is_written_is_gone():
    store = OnceFailingStore()
    journal, _ = await take_over(store, 1)
    store.fails_at = "death/"
    await asyncio.gather(journal.add_death("decode-0-1"), journal.remove_death("decode-0-1"))
    assert not [key for key in await store.keys("") if "death/" in key]


async def test_a_controller_with_a_successor_writes_nothing():
    store = InProcessStore()
    leases = leases_of(1)
    journal, _ = await Journal.take_over(store, leases)
    leases.give_up()
    waiting = asyncio.create_task(journal.add_worker(PLANNED))
    await asyncio.sleep(0)
    _, before = await take_over(store, 2)
    assert before == Records(ClusterRecord(), {}, frozenset())
    assert not waiting.done()
    waiting.cancel()
