"""The store of files: what was kept is found, by others too; what is not the page is a miss."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvrelay.mem_cache.storage_files import FileStore
from kvrelay.mem_cache.storage_format import RECORD_BYTES, IndexRecord, StorageFormat
from kvrelay.mem_cache.storage_index import IndexReader
from kvrelay.mem_cache.storage_pages import (
    NOTHING_BEFORE,
    RETRY_SECONDS,
    StoragePage,
    StoreOperation,
)
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes, token_bytes
from tests.known import known
from tests.mem_cache.plain_files import Budget, Killed, PlainFiles, kill_index_writes

PAGE_TOKENS = 4
POOL_BYTES = (96, 40)
"""Of a page in each of two pools."""
LAYOUT = StorageFormat(bytes(range(32)), 4 * PAGE_TOKENS, sum(POOL_BYTES))
HASHES = PageHashes(NO_MODEL, PAGE_TOKENS)
PROPERTY = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0  # so that what is known of other folders is always too old
        return self.now


class Worker:
    """A store with a host pool of 32 pages; the bytes of a page are made of its hash."""

    def __init__(
        self, root: Path, slots: int = 12, layout: StorageFormat = LAYOUT, **options: Any
    ) -> None:
        self.memory = [np.zeros((32, nbytes), np.uint8) for nbytes in POOL_BYTES]
        self.io = PlainFiles(**options)
        self.clock = Clock()
        size = slots * layout.slot_bytes + 100
        self.store = FileStore(root, layout, size, PAGE_TOKENS, self.memory, self.io, self.clock)

    def put(self, pages: Sequence[StoragePage]) -> list[bool]:
        for page in pages:
            self.fill(page)
        return self.finish(self.store.put(pages))

    def exists(self, keys: list[bytes]) -> int:
        """How many of neighbouring pages there are, from the first one on."""
        there = self.store.exists(keys)
        return next((at for at, one in enumerate(there) if not one), len(keys))

    def fill(self, page: StoragePage) -> None:
        for pool in self.memory:
            pool[page.slot] = bytes_of(page.key, pool.shape[1])

    def get(self, pages: Sequence[StoragePage]) -> list[bool]:
        """Which came; those are right."""
        for pool in self.memory:
            pool[:] = 0xEE
        self.exists(keys(pages))
        return self.check(pages, self.finish(self.store.get(pages)))

    def check(self, pages: Sequence[StoragePage], valid: list[bool]) -> list[bool]:
        for page, came in zip(pages, valid, strict=True):
            for pool in self.memory:
                right = (pool[page.slot] == bytes_of(page.key, pool.shape[1])).all()
                assert right or not came, "a wrong page came"
        return valid

    def finish(self, operation: StoreOperation) -> list[bool]:
        while (valid := operation.poll()) is None:
            time.sleep(0)
        self.store._own.slots.check_slots()
        return list(valid)

    def close(self) -> None:
        counts = known(self.store.state().pool)
        assert counts.in_flight == counts.cached_protected == 0
        assert not self.store.buffers.num_taken
        self.store.close()

    def kill(self) -> None:
        """Leave everything as it is; the system closes the files, and ends the lock."""
        self.store._sync.close()
        own = self.store._own
        os.close(own._lock)
        own._index.close()
        for segment in own._segments.values():
            os.close(segment.file)

    @property
    def broken(self) -> int:
        return self.store.state().broken_pages


def bytes_of(key: bytes, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(list(key)).integers(0, 256, nbytes, np.uint8)


def prompt(number: int, pages: int, namespace: str = "") -> list[StoragePage]:
    """The first pages of a prompt, in the first slots of the host."""
    tokens = token_bytes([number * 100 + at for at in range(pages * PAGE_TOKENS)])
    keys = HASHES.extend(HASHES.root(namespace), tokens)
    split = [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]
    size = 4 * PAGE_TOKENS
    return [
        StoragePage(key, before, tokens[at * size : (at + 1) * size], at)
        for at, (before, key) in enumerate(zip([NOTHING_BEFORE, *split], split, strict=False))
    ]


def keys(pages: Sequence[StoragePage]) -> list[bytes]:
    return [page.key for page in pages]


def test_what_was_put_comes_back(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 5)
    assert worker.exists(keys(pages)) == 0
    assert worker.put(pages[:3]) == [True] * 3
    assert worker.exists(keys(pages)) == 3
    assert worker.get(pages) == [True, True, True, False, False]
    assert worker.put(pages) == [True] * 5, "the first three are left as they are"
    counts = known(worker.store.state().pool)
    assert (counts.cached_evictable, counts.free) == (5, 7)
    worker.close()


def test_a_page_is_not_found_before_it_is_written(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 2)
    for page in pages:
        worker.fill(page)
    putting = worker.store.put(pages)
    reader = Worker(tmp_path)
    while putting.poll() is None:
        assert worker.exists(keys(pages)) == reader.exists(keys(pages)) == 0
    assert worker.exists(keys(pages)) == reader.exists(keys(pages)) == 2
    worker.close()
    reader.close()


def test_what_was_used_longest_ago_is_evicted_and_the_end_of_a_prompt_first(tmp_path: Path):
    worker = Worker(tmp_path, slots=6)
    one, two = prompt(1, 3), prompt(2, 3)
    worker.put(one)
    worker.put(two)
    assert worker.exists(keys(one)) == 3
    assert worker.put(prompt(3, 2)) == [True, True]
    assert [worker.exists(keys(pages)) for pages in (one, two)] == [3, 1]
    assert worker.store.state().evicted_pages == 2
    worker.close()


def test_pages_that_are_read_are_not_evicted(tmp_path: Path):
    worker, one = Worker(tmp_path, slots=3), prompt(1, 2)
    worker.put(one)
    reading = worker.store.get(one)
    assert sum(worker.put(prompt(2, 3))) == 1
    assert worker.check(one, worker.finish(reading)) != [False, False]
    assert sum(worker.put(prompt(3, 3))) == 3
    worker.close()


def test_what_is_dropped_while_it_is_read_is_free_when_that_has_ended(tmp_path: Path):
    worker, one = Worker(tmp_path, slots=3), prompt(1, 2)
    worker.put(one)
    reading = worker.store.get(one)
    worker.store.forget([one[0].key])
    assert worker.exists(keys(one)) == 0
    assert known(worker.store.state().pool).in_flight == 2
    worker.finish(reading)
    assert known(worker.store.state().pool).free == 3
    worker.close()


def test_workers_find_each_others_pages(tmp_path: Path):
    first, second = Worker(tmp_path), Worker(tmp_path)
    one, two = prompt(1, 3), prompt(2, 3)
    first.put(one)
    second.put(two)
    assert second.get(one) == first.get(two) == [True] * 3
    assert second.put(one) == [True] * 3, "there is no second copy"
    assert known(second.store.state().pool).cached_evictable == 3
    first.close()
    # Its folder is there, and nobody's.
    assert second.get(one) == [True] * 3
    third = Worker(tmp_path)
    assert third.store._own.path == first.store._own.path
    assert known(third.store.state().pool).cached_evictable == 3
    for worker in (second, third):
        worker.close()


def test_a_page_that_its_writer_reuses_is_a_miss_of_others(tmp_path: Path):
    writer, reader = Worker(tmp_path, slots=2), Worker(tmp_path)
    one = prompt(1, 2)
    writer.put(one)
    assert reader.exists(keys(one)) == 2
    reader.store._clock = lambda: 0.0  # it does not look again
    reader.store._refreshed = 0.0
    writer.put(prompt(2, 2))
    assert reader.get(one) == [False, False]
    assert reader.broken == 0
    assert reader.exists(keys(one)) == 0
    writer.close()
    reader.close()


def test_a_successor_has_what_was_there_in_its_order(tmp_path: Path):
    worker = Worker(tmp_path, slots=6)
    one, two = prompt(1, 3), prompt(2, 3)
    worker.put(one)
    worker.put(two)
    worker.close()
    worker = Worker(tmp_path, slots=6)
    assert worker.put(prompt(3, 3)) == [True] * 3
    assert [worker.exists(keys(pages)) for pages in (one, two)] == [0, 3]
    worker.close()


@pytest.mark.parametrize("slots", [2, 40])
def test_a_successor_may_have_another_size(
    tmp_path: Path, slots: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LAYOUT, "segment_slots", 4)
    pages = prompt(1, 10)
    worker = Worker(tmp_path, slots=12)
    worker.put(pages)
    worker.close()
    worker = Worker(tmp_path, slots=slots)
    assert worker.get(pages) == [at < slots for at in range(10)]
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*/segment-*"))]
    assert sum(sizes) <= LAYOUT.segment_bytes(slots) + 3 * 4096
    more = prompt(2, 12)
    assert sum(worker.put(more)) == min(slots, 12)
    worker.close()


def test_a_long_index_is_written_anew_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvrelay.mem_cache.storage_index._SPARE_RECORDS", 4)
    writer, reader = Worker(tmp_path, slots=4), Worker(tmp_path)
    for number in range(20):
        pages = prompt(number, 3)
        writer.put(pages)
        assert reader.get(pages) == [True] * 3
    index = writer.store._own.path / "index"
    assert index.stat().st_size < 25 * 80
    writer.close()
    writer = Worker(tmp_path, slots=4)
    assert writer.get(pages) == [True] * 3
    writer.close()
    reader.close()


def test_a_page_goes_with_what_continues_it(tmp_path: Path):
    """Or what was computed from a wrong page would be found again behind the right one."""
    worker, pages = Worker(tmp_path, slots=8), prompt(1, 4)
    worker.put(pages)
    worker.store._own.drop([pages[2].key])
    worker.store.forget([pages[1].key])
    assert worker.put(pages[:3]) == [True] * 3
    assert worker.get(pages) == [True, True, True, False]
    worker.close()
    worker = Worker(tmp_path, slots=8)
    assert worker.get(pages) == [True, True, True, False]
    worker.close()


def test_what_continues_anothers_page_is_forgotten_with_what_is_before_that(tmp_path: Path):
    """As long as the other worker has it, and when nobody knows any more what it continues."""
    for is_there in (True, False):
        root = tmp_path / str(is_there)
        other, worker, pages, kept = Worker(root, slots=4), Worker(root), prompt(1, 4), prompt(2, 2)
        worker.put(kept)
        other.put(pages[:2])
        assert worker.exists(keys(pages)) == 2
        assert worker.put(pages) == [True] * 4
        assert known(worker.store.state().pool).cached_evictable == 4, "of each there is one"
        if not is_there:
            other.put(prompt(3, 4))
            assert worker.exists(keys(pages)) == 0
        worker.store.forget([pages[0].key])
        other.put(prompt(3, 4))
        other.put(pages[:2])
        assert worker.get(pages) == [True, True, False, False]
        assert worker.get(kept) == [True, True], "it continues nothing that was forgotten"
        for one in (worker, other):
            one.close()


def test_a_record_that_is_broken_between_others_costs_its_page_alone(tmp_path: Path):
    writer, reader = Worker(tmp_path), Worker(tmp_path)
    one, two = prompt(1, 1), prompt(2, 2)
    writer.put(one)
    writer.put(two)
    index = writer.store._own.path / "index"
    whole = index.read_bytes()
    at = len(LAYOUT.file_header)
    index.write_bytes(whole[:at] + b"?" * RECORD_BYTES + whole[at + RECORD_BYTES :])
    assert not any(reader.get(two)), "it may be written just now"
    for _ in range(20):
        reader.store.exists(keys(two))
    assert reader.get(two) == [True, True]
    assert reader.get(one) == [False]
    more = prompt(3, 1)
    writer.put(more)
    assert reader.get(more) == [True]
    writer.kill()
    writer = Worker(tmp_path)
    assert (writer.get(one), writer.get(two)) == ([False], [True, True])
    assert writer.broken == 1
    assert reader.get(two) == [True, True]
    assert len(index.read_bytes()) == at + 3 * RECORD_BYTES, "it is written anew"
    for worker in (writer, reader):
        worker.close()


def test_each_broken_record_is_read_as_often(tmp_path: Path):
    """One that was read while it was written takes no try from those behind it."""
    first, second, third = (
        IndexRecord(n, bytes([n]) * HASH_BYTES, NOTHING_BEFORE).pack() for n in range(3)
    )
    broken, reader = b"?" * RECORD_BYTES, IndexReader(tmp_path, LAYOUT, most_tries=3)

    def read(*records: bytes) -> int:
        (tmp_path / "index").write_bytes(LAYOUT.file_header + b"".join(records))
        reader.refresh()
        return len(reader.pages.by_key)

    assert [read(broken, second), read(broken, second), read(first, second)] == [0, 0, 2]
    behind = (first, second, broken, third)
    assert [read(*behind), read(*behind), read(*behind)] == [2, 2, 3]
    assert reader.broken == 1
    reader.close()


HANG_AT_THE_END = """
import sys, threading, time
from pathlib import Path
from kvrelay.mem_cache import storage_files
from tests.mem_cache.test_storage_files import Worker, prompt
began = threading.Event()
def hang(files):
    began.set()
    threading.Event().wait()
storage_files._sync_all = hang
worker = Worker(Path(sys.argv[1]))
putting = worker.store.put(prompt(1, 2))
while not began.is_set():
    assert putting.poll() is None
    time.sleep(0.001)
"""


def test_a_process_ends_though_its_disk_hangs(tmp_path: Path):
    command = [sys.executable, "-c", HANG_AT_THE_END, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=60)


def test_what_is_forgotten_while_it_is_written_is_not_kept(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 3)
    putting = worker.store.put(pages)
    worker.store.forget(keys(pages[1:]))
    assert worker.finish(putting) == [True, False, False]
    assert worker.exists(keys(pages)) == 1
    assert known(worker.store.state().pool).free == 11
    worker.close()


# What is not the page


def test_what_another_layout_has_written_is_removed(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 3)
    worker.put(pages)
    worker.close()
    other = StorageFormat(bytes(32), 4 * PAGE_TOKENS, sum(POOL_BYTES))
    worker = Worker(tmp_path, layout=other)
    assert worker.get(pages) == [False] * 3
    assert worker.put(pages) == [True] * 3
    worker.close()


def test_a_page_of_other_tokens_under_the_same_hash_is_a_miss(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 1)
    worker.put(pages)
    forged = StoragePage(pages[0].key, pages[0].before, bytes(4 * PAGE_TOKENS), 0)
    assert worker.get([forged]) == [False]
    worker.close()


def files_of(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("*/*")) if path.name != "lock"]


DAMAGE: dict[str, Callable[[Path, int], None]] = {}


def damage(function: Callable[[Path, int], None]) -> Callable[[Path, int], None]:
    DAMAGE[function.__name__] = function
    return function


@damage
def flip_a_bit_of_a_slot(path: Path, at: int) -> None:
    """Of what is looked at there."""
    slot, byte = divmod(at // 8, 200 + sum(POOL_BYTES))
    byte += LAYOUT.header_bytes - 200 if byte >= 200 else 0
    flip_a_bit(path, 8 * (4096 + slot % 5 * LAYOUT.slot_bytes + byte) + at % 8)


@damage
def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at // 8 % len(content)] ^= 1 << at % 8
    path.write_bytes(content)


@damage
def cut_off(path: Path, at: int) -> None:
    os.truncate(path, at % (path.stat().st_size + 1))


@damage
def swap_slots(path: Path, at: int) -> None:
    content, size = bytearray(path.read_bytes()), LAYOUT.slot_bytes
    a, b = 4096 + at % 5 * size, 4096 + at // 5 % 5 * size
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    path.write_bytes(content)


@damage
def remove(path: Path, at: int) -> None:
    path.unlink()


@damage
def replace_by_another_file(path: Path, at: int) -> None:
    others = files_of(path.parents[1])
    path.write_bytes(others[at % len(others)].read_bytes())


DAMAGES: dict[str, st.SearchStrategy[Any]] = {
    "kind": st.sampled_from(sorted(DAMAGE)),
    "which": st.integers(0, 10),
    "at": st.integers(0, 1 << 20),
    "running": st.booleans(),
}


def survives_damage(root: Path, kind: str, which: int, at: int, running: bool) -> None:
    """Of files of a worker that runs, or of one that is gone; the reader is another worker.

    Then all pages can be kept, and come back, again.
    """
    writer, reader = Worker(root), Worker(root)
    pages = prompt(1, 5)
    writer.put(pages)
    assert reader.get(pages) == [True] * 5
    if not running:
        writer.close()
    files = files_of(root)
    DAMAGE[kind](files[which % len(files)], at)
    reader.get(pages)
    if running:
        writer.get(pages)
        writer.close()
    again = Worker(root)
    assert again.exists(keys(pages)) <= 5
    again.get(pages)
    assert again.put(pages) == [True] * 5
    assert again.get(pages) == [True] * 5
    again.close()
    reader.close()


@PROPERTY
@given(**DAMAGES)
def test_damage_is_a_miss_and_never_a_wrong_page(
    tmp_path_factory: pytest.TempPathFactory, **damages: Any
):
    root = tmp_path_factory.mktemp("damage")
    survives_damage(root, **damages)
    shutil.rmtree(root)


def test_damage_is_counted_and_removed(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 3)
    worker.put(pages)
    place = known(worker.store.find(pages[1].key))
    os.pwrite(place.segment.file, b"?", place.offset + LAYOUT.header_bytes + 7)
    assert worker.get(pages) == [True, False, True]
    assert (worker.broken, worker.exists(keys(pages))) == (1, 1)
    assert known(worker.store.state().pool).cached_evictable == 1
    worker.put(pages)
    os.truncate(place.segment.path, LAYOUT.segment_bytes(2))
    assert sum(worker.get(pages)) < 3
    assert worker.broken > 1
    worker.close()


KILLS: dict[str, st.SearchStrategy[Any]] = {
    "budget": st.integers(0, 80_000),
    "prompts": st.permutations(range(6)),
}


def survives_a_kill(root: Path, budget: int, prompts: Sequence[int]) -> None:
    """At any byte. What was found before is there, but for what made room; nothing is broken."""
    worker, ended = Worker(root, slots=6), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        kill_index_writes(patch, worker.io.budget)
        worker.io.budget.left = budget
        try:
            for number in prompts:
                worker.put(prompt(number, 3))
                ended.append(number)
        except Killed:
            worker.kill()
        else:
            worker.close()
    again = Worker(root, slots=6)
    kept = {number: again.get(prompt(number, 3)) for number in prompts}
    assert not again.broken
    # Two fit; the older one may have made room for what was being written.
    for number in ended[-2:] if len(ended) in (1, 6) else ended[-1:]:
        assert kept[number] == [True] * 3
    again.put(prompt(7, 3))
    again.close()
    again = Worker(root, slots=6)
    assert again.get(prompt(7, 3)) == [True] * 3
    assert not again.broken
    again.close()


@PROPERTY
@given(**KILLS)
def test_a_worker_that_is_killed_loses_only_what_it_was_writing(
    tmp_path_factory: pytest.TempPathFactory, **kills: Any
):
    root = tmp_path_factory.mktemp("killed")
    survives_a_kill(root, **kills)
    shutil.rmtree(root)


# A disk that takes no more


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_turns_writing_off_until_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(LAYOUT, "segment_slots", 4)
    worker, pages = Worker(tmp_path), prompt(1, 6)
    worker.put(pages[:4])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        assert worker.put(pages) == [True] * 4 + [False] * 2
        assert worker.store.state().write_error == "the disk is full"
        assert "nothing more is written" in caplog.text
        assert worker.get(pages[:4]) == [True] * 4, "what is there is read"
    assert worker.put(pages[4:]) == [False] * 2, "it is not tried all the time"
    worker.clock.now += RETRY_SECONDS
    assert worker.put(pages[4:]) == [True] * 2
    assert worker.store.state().write_error == ""
    worker.close()


@pytest.mark.parametrize("where", ["transfer", "sync", "index"])
def test_a_write_that_fails_keeps_nothing_and_loses_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    worker, pages = Worker(tmp_path), prompt(1, 3)
    with monkeypatch.context() as patch:
        worker.io.write_fails = where == "transfer"
        if where == "sync":
            patch.setattr(os, "fdatasync", refuse)
        if where == "index":
            patch.setattr("kvrelay.mem_cache.storage_index._write", refuse)
        assert worker.put(pages) == [False] * 3
    assert worker.store.state().write_error
    assert known(worker.store.state().pool).free == 12
    worker.io.write_fails = False
    worker.clock.now += RETRY_SECONDS
    assert worker.put(pages) == [True] * 3
    worker.close()


def test_folders_that_are_not_ours_alone_are_refused(tmp_path: Path):
    """Else somebody else's files could be removed, or prompts read."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "index").write_text("mine")
    (root / "writer-0").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        Worker(root)
    assert (elsewhere / "index").read_text() == "mine"
    (root / "writer-0").unlink()
    (root / "writer-0").mkdir(mode=0o777)
    (root / "writer-0").chmod(0o777)
    with pytest.raises(PermissionError):
        Worker(root)
    (root / "writer-0").chmod(0o700)
    (root / "writer-0" / "notes").mkdir()
    Worker(root).close()


def test_what_is_forgotten_cannot_be_read_whatever_the_index_says(tmp_path: Path):
    worker, pages = Worker(tmp_path), prompt(1, 3)
    worker.put(pages)
    index = worker.store._own.path / "index"
    before = index.read_bytes()
    worker.store.forget(keys(pages[:1]))
    worker.close()
    index.write_bytes(before)  # a disk that has lost the last record
    worker = Worker(tmp_path)
    assert worker.exists(keys(pages)) == 3
    assert worker.get(pages) == [False] * 3
    worker.close()


def test_what_is_forgotten_stays_so_though_a_part_of_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A header that cannot be overwritten, or an index that cannot be written: not both."""
    worker, pages = Worker(tmp_path), prompt(1, 3)
    worker.put(pages)
    write, tries = os.pwrite, [0]

    def fail_once(file: int, content: bytes, offset: int) -> int:
        tries[0] += 1
        if tries[0] == 1:
            raise OSError(errno.EIO, "it fails")
        return write(file, content, offset)

    monkeypatch.setattr(os, "pwrite", fail_once)
    worker.store.forget([pages[0].key])
    monkeypatch.setattr(os, "pwrite", write)
    assert tries[0] > 3, "the other headers, and the index"
    assert "it fails" in worker.store.state().write_error
    worker.kill()
    worker = Worker(tmp_path)
    assert worker.exists(keys(pages)) == 0
    worker.close()


def test_a_page_that_cannot_be_read_once_is_kept(tmp_path: Path):
    """A disk that fails for a moment does not cost all that was read just then."""
    worker, pages = Worker(tmp_path), prompt(1, 2)
    worker.put(pages)
    worker.io.read_fails = True
    assert worker.get(pages) == [False, False]
    worker.io.read_fails = False
    assert worker.get(pages) == [True, True]
    worker.io.read_fails = True
    assert worker.get(pages) == [False, False]
    assert worker.broken == 0
    assert worker.get(pages) == [False, False]
    assert worker.broken
    assert worker.exists(keys(pages)) == 0
    worker.close()


def test_a_page_is_kept_that_cannot_be_opened_for_too_many_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    writer, reader, pages = Worker(tmp_path), Worker(tmp_path), prompt(1, 2)
    writer.put(pages)

    def refuse_file(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("kvrelay.mem_cache.storage_folders.SegmentFile", refuse_file)
        assert reader.get(pages) == [False, False]
    assert reader.get(pages) == [True, True]
    assert reader.broken == 0
    for worker in (writer, reader):
        worker.close()


def test_a_store_whose_memory_is_refused_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(PlainFiles, "add_memory", refuse)
        with pytest.raises(OSError, match="No space"):
            Worker(tmp_path)
    worker = Worker(tmp_path)
    assert worker.store._own.path.name == "writer-0"
    worker.close()


def test_a_store_that_holds_no_page_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="do not hold one page"):
        Worker(tmp_path, slots=0)


def test_a_budget_is_spent() -> None:
    budget = Budget(5)
    assert (budget.spend(3), budget.spend(3), budget.left) == (3, 2, 0)
