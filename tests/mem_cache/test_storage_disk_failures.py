"""The store of files on a disk that is full or fails, and in folders that it must not use."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvrelay.mem_cache.storage.storage_pages import RETRY_SECONDS
from tests.known import known
from tests.mem_cache.plain_files import Budget, PlainFiles
from tests.mem_cache.stored_files import LAYOUT, Worker, keys, prompt


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
            patch.setattr("kvrelay.mem_cache.storage.storage_index._write", refuse)
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
        patch.setattr("kvrelay.mem_cache.storage.storage_folders.SegmentFile", refuse_file)
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
