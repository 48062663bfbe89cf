"""NIXL moves pages between memory and real files; the store of files runs on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvrelay.kv_transfer.nixl_files import NixlFiles
from kvrelay.mem_cache.storage.file_io import FilePiece, FileTransfer
from kvrelay.mem_cache.storage.storage_files import FileStore
from kvrelay.mem_cache.storage.storage_pages import StoragePage, StoreOperation
from tests.mem_cache.stored_files import LAYOUT, PAGE_TOKENS, POOL_BYTES, bytes_of, prompt

WAIT_S = 60.0


def finish(transfer: FileTransfer | StoreOperation) -> bool | Sequence[bool]:
    until = time.monotonic() + WAIT_S
    while (ended := transfer.poll()) is None:
        assert time.monotonic() < until, "it does not end"
        time.sleep(1e-4)
    return ended


class Files:
    """NIXL, a file of 64 KiB, and as much memory."""

    def __init__(self, path: Path) -> None:
        self.io = NixlFiles()
        self.memory = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[: 1 << 16].copy()
        self.io.add_memory(self.memory.ctypes.data, self.memory.nbytes)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.file, 0, 1 << 16)
        self.io.add_file(self.file, 1 << 16)

    def piece(self, at: int, offset: int, nbytes: int) -> FilePiece:
        return FilePiece(self.memory.ctypes.data + at, offset, nbytes)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path / "file")
    yield files
    files.io.remove_file(files.file)
    os.close(files.file)
    files.io.close()


def test_pieces_go_to_a_file_and_come_back(files: Files):
    """Of any size, at any place; what is between them stays as it is."""
    original = files.memory.copy()
    pieces = [files.piece(100, 8192, 5000), files.piece(0, 0, 1), files.piece(9000, 30001, 12345)]
    assert finish(files.io.write(files.file, pieces)) is True
    content = os.pread(files.file, 1 << 16, 0)
    assert content[8192:13192] == original[100:5100].tobytes()
    assert content[13192:30001] == bytes(30001 - 13192)
    files.memory[:] = 0
    assert finish(files.io.read(files.file, pieces)) is True
    for at, nbytes in ((100, 5000), (0, 1), (9000, 12345)):
        assert (files.memory[at : at + nbytes] == original[at : at + nbytes]).all()
    assert not files.memory[21345:].any()


def test_a_file_that_is_cut_off_is_told_and_nixl_goes_on(files: Files):
    piece = files.piece(0, 4096, 4096)
    assert finish(files.io.write(files.file, [piece])) is True
    os.ftruncate(files.file, 5000)
    assert finish(files.io.read(files.file, [piece])) is False
    assert finish(files.io.write(files.file, [piece])) is True
    files.memory[:4096] = 0
    assert finish(files.io.read(files.file, [piece])) is True
    assert files.memory[:4096].any()


NUM_PIECES = 300


def test_no_byte_arrives_after_an_error_and_no_other_transfer_notices(tmp_path: Path):
    """Of hundreds of pieces one is beyond the file's end: who is told so reuses their memory."""
    size = 4096
    io, memory = NixlFiles(), np.zeros((2, NUM_PIECES, size), np.uint8)
    io.add_memory(memory.ctypes.data, memory.nbytes)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    content = np.random.default_rng(1).integers(1, 256, (NUM_PIECES, size), np.uint8)
    os.pwrite(file, content[:-1].tobytes(), 0)
    io.add_file(file, NUM_PIECES * size)

    def read(part: int, last: int) -> FileTransfer:
        address = memory[part].ctypes.data
        return io.read(
            file, [FilePiece(address + at * size, at * size, size) for at in range(last)]
        )

    for _ in range(3):
        memory[:] = 0
        broken, whole = read(0, NUM_PIECES), read(1, NUM_PIECES - 1)
        assert finish(broken) is False
        memory[0] = 0xEE
        assert finish(whole) is True
        assert finish(read(1, NUM_PIECES - 1)) is True, "and the next one ends well"
        assert (memory[1, :-1] == content[:-1]).all()
        assert (memory[0] == 0xEE).all(), "bytes came after the error"
    io.remove_file(file)
    os.close(file)
    io.close()


def test_nixl_without_its_backend_is_told_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvrelay.kv_transfer.nixl_files._BACKEND", "NONE")
    with pytest.raises(RuntimeError, match="NIXL cannot use files here"):
        NixlFiles()


class Store:
    """A store of files by NIXL."""

    def __init__(self, root: Path, slots: int = 12) -> None:
        self.memory = [np.zeros((32, nbytes), np.uint8) for nbytes in POOL_BYTES]
        size = slots * LAYOUT.slot_bytes
        self.store = FileStore(root, LAYOUT, size, PAGE_TOKENS, self.memory, NixlFiles())

    def put(self, pages: Sequence[StoragePage]) -> bool | Sequence[bool]:
        for page in pages:
            for pool in self.memory:
                pool[page.slot] = bytes_of(page.key, pool.shape[1])
        return finish(self.store.put(pages))

    def get(self, pages: Sequence[StoragePage]) -> list[bool]:
        for pool in self.memory:
            pool[:] = 0xEE
        valid = finish(self.store.get(pages))
        assert not isinstance(valid, bool)
        for page, came in zip(pages, valid, strict=True):
            for pool in self.memory:
                assert not came or (pool[page.slot] == bytes_of(page.key, pool.shape[1])).all()
        return list(valid)


def test_a_store_by_nixl_keeps_pages_over_its_end(tmp_path: Path):
    pages = prompt(1, 5)
    first, other = Store(tmp_path), Store(tmp_path)
    assert first.put(pages) == [True] * 5
    until = time.monotonic() + WAIT_S
    while not all(other.store.exists([page.key for page in pages])):
        assert time.monotonic() < until, "the other one does not see them"
    assert other.get(pages) == [True] * 5, "another worker reads it"
    first.store.close()
    first = Store(tmp_path)
    assert first.get(pages) == [True] * 5
    assert first.store.measure_bytes_per_second() > 0
    for store in (first, other):
        store.store.close()


def test_one_page_that_cannot_be_read_does_not_cost_the_others(tmp_path: Path):
    store, pages = Store(tmp_path), prompt(1, 4)
    store.put(pages)
    segment = next(tmp_path.glob("*/segment-*"))
    size = segment.stat().st_size
    place = store.store.find(pages[1].key)
    assert place is not None
    os.pwrite(place.segment.file, b"?" * 32, place.offset + 40)
    assert store.get(pages) == [True, False, True, True]
    assert store.store.state().broken_pages == 1
    assert segment.stat().st_size == size
    store.store.close()


FULL_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_turns_writing_off_and_keeps_what_is_there(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LAYOUT, "segment_slots", 16)
    store = Store(small_disk / "layout", slots=200)
    for number in range(40):
        store.put(prompt(number, 5))
    state = store.store.state()
    assert state.write_error == "the disk is full"
    kept = sum(sum(store.get(prompt(number, 5))) for number in range(40))
    assert 16 <= kept < FULL_BYTES // LAYOUT.slot_bytes
    store.store.close()


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from tests.kv_transfer.test_nixl_files import Store
from tests.mem_cache.stored_files import prompt
store = Store(Path(sys.argv[1]), slots=9)
for number in range(1_000_000):
    store.put(prompt(number, 3))
    print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_what_it_had_written(tmp_path: Path):
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)]
    folder = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True) as writer:
        assert writer.stdout is not None
        last = -1
        while last < 20:
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
    last = int(rest[-1]) if rest else last
    store = Store(tmp_path, slots=9)
    # Of three that fit one or two may have made room, if a later one was whole or nearly.
    assert store.get(prompt(last, 3)) == [True] * 3
    for number in range(last + 3):
        store.get(prompt(number, 3))
    assert store.store.state().broken_pages == 0
    store.store.close()
