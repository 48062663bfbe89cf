"""What is not the page is a miss, whatever has become of the files or of who wrote them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.mem_cache.storage.storage_pages import StoragePage
from tests.known import known
from tests.mem_cache.plain_files import Killed, kill_index_writes
from tests.mem_cache.stored_files import LAYOUT, PAGE_TOKENS, POOL_BYTES, Worker, keys, prompt

PROPERTY = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


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
