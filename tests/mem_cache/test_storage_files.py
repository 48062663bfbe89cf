"""The store of files: what was kept is found, by others and by successors too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.mem_cache.storage.storage_format import RECORD_BYTES, IndexRecord
from kvrelay.mem_cache.storage.storage_index import IndexReader
from kvrelay.mem_cache.storage.storage_pages import NOTHING_BEFORE
from kvrelay.wire.page_hash import HASH_BYTES
from tests.known import known
from tests.mem_cache.stored_files import LAYOUT, Worker, keys, prompt


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
    monkeypatch.setattr("kvrelay.mem_cache.storage.storage_index._SPARE_RECORDS", 4)
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
from kvrelay.mem_cache.storage import storage_files
from tests.mem_cache.stored_files import Worker, prompt
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
