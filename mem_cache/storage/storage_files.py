"""A `PageStore` of files: preallocated segments of slots, in a folder that may be shared.

Written pages are safe before the index names them. A page that was read is believed only if the
slot's header and the checksum say that it is the very page. So a reader needs no lock on slots that
a writer, in this process or another, may reuse meanwhile. Anything that is not the page is a miss,
is counted, and is removed from where it was found.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.device.daemon_threads import DaemonThreads
from kvrelay.mem_cache.storage.file_io import FileIO, FilePiece, FileTransfer
from kvrelay.mem_cache.storage.storage_buffers import HostMemory, PageBuffers
from kvrelay.mem_cache.storage.storage_folders import (
    OtherFolder,
    OwnFolder,
    PageLocation,
    other_folders,
)
from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.mem_cache.storage.storage_pages import (
    NOTHING_BEFORE,
    RETRY_SECONDS,
    StoragePage,
    StoreOperation,
    StoreState,
)

logger = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 0.05
"""The greatest age of the knowledge of other folders, in seconds."""
_PROBE_BYTES: Final = 8 << 20
_GUESSED_BYTES_PER_SECOND: Final = 5e8


class FileStore:
    """A store that keeps pages in files, and finds those of other workers in the same folder.

    Args:
        root: the folder of all workers of one layout.
        layout: of the slots.
        size: the most bytes of slots that this worker fills.
        page_size: tokens a page.
        memory: the host's pools. They must stay in place.
        io: moves bytes.
        clock: seconds.

    Raises:
        OSError: the folder cannot be used.
        ValueError: `size` does not hold one page.
    """

    def __init__(
        self,
        root: Path,
        layout: StorageFormat,
        size: int,
        page_size: int,
        memory: HostMemory,
        io: FileIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slots = size // layout.slot_bytes
        if not slots:
            raise ValueError(f"{size} bytes do not hold one page of {layout.slot_bytes}")
        self._format = layout
        self._memory = memory
        self._io = io
        self._clock = clock
        self._root = root
        self._own = OwnFolder(root, layout, slots, page_size, io)
        self._others: dict[Path, OtherFolder] = {}
        self._refreshed = -_REFRESH_SECONDS
        self._broken = self._own.broken
        self._write_error = ""
        self._retry_at = 0.0
        self._puts: list[_Put] = []
        self._sync = DaemonThreads(1, "storage-sync")
        self.buffers = PageBuffers(layout, memory)
        """The memory that is read from and written to."""
        try:
            for address, nbytes in self.buffers.regions:
                io.add_memory(address, nbytes)
        except BaseException:
            self._own.close()
            raise
        self._refresh()  # much, if the folder is full: not when a request waits

    # PageStore

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See `PageStore`."""
        self._refresh()
        self._own.slots.use(keys)
        return [self.has(key) for key in keys]

    def get(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """See `PageStore`."""
        return _Get(self, pages)

    def put(self, pages: Sequence[StoragePage]) -> StoreOperation:
        """See `PageStore`."""
        self._puts = [one for one in self._puts if not one.ended]
        self._puts.append(_Put(self, pages))
        return self._puts[-1]

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `PageStore`."""
        for put in self._puts:
            put.cleared.update(keys)
        self._refreshed = -_REFRESH_SECONDS
        self._refresh()
        with self._writing():
            self._own.forget(self._which_may_continue(keys))

    def _which_may_continue(self, keys: Sequence[bytes]) -> list[bytes]:
        """Find the pages here that continue, or may continue, one of these.

        The page before a page may be in another worker's folder, or may be gone from there.
        """
        may: dict[bytes, bool] = {NOTHING_BEFORE: False, **dict.fromkeys(keys, True)}
        for page in self._own.slots:
            row: list[bytes] = []
            key: bytes | None = page.key
            while key is not None and key not in may:
                row.append(key)
                may[key] = True  # a foreign index may go round in a circle
                key = self._before(key)
            may.update(dict.fromkeys(row, key is None or may[key]))
        return [page.key for page in self._own.slots if may[page.key]]

    def _before(self, key: bytes) -> bytes | None:
        """Find the key of the page before one; None: the page is nowhere."""
        page = self._own.slots.find(key)
        if page is not None:
            return page.before
        return next(filter(None, (one.before(key) for one in self._others.values())), None)

    def state(self) -> StoreState:
        """See `PageStore`. Raises `ConservationError` if a slot was lost."""
        self._own.slots.check()
        return StoreState(
            self._own.slots.counts(), self._own.slots.evicted, self._broken, self._write_error
        )

    def close(self) -> None:
        """See `PageStore`."""
        self._sync.close()
        for folder in self._others.values():
            folder.close()
        self._own.close()
        self._io.close()

    def measure_bytes_per_second(self) -> float:
        """Measure how fast uncached bytes come from the disk.

        Blocks for some milliseconds; called before anything else. Returns a guess if nothing can be
        written.
        """
        try:
            return measure_reads(self._own.path / "probe", self._memory[0], self._io)
        except OSError as error:
            self._stop_writing(error)
            return _GUESSED_BYTES_PER_SECOND

    # Where pages are

    def _refresh(self) -> None:
        """Read what other workers have written since, unless that was done just now."""
        now = self._clock()
        if now - self._refreshed < _REFRESH_SECONDS:
            return
        self._refreshed = now
        try:
            paths = set(other_folders(self._root, self._own.path))
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._root, error)
            return
        for gone in self._others.keys() - paths:
            self._others.pop(gone).close()
        for path in paths:
            folder = self._others.get(path)
            if folder is None:
                folder = self._others[path] = OtherFolder(path, self._format, self._io)
            folder.refresh()

    def has(self, key: bytes) -> bool:
        """Whether a page should be there, in any worker's folder."""
        return self._own.has(key) or any(folder.has(key) for folder in self._others.values())

    def find(self, key: bytes) -> PageLocation | None:
        """Find the place of a page; one that is known to be cut off is removed."""
        if self._own.has(key):
            place = self._own.place_of(key)
            if place is not None:
                return place
            self.drop_broken(key, None)
        for folder in self._others.values():
            if folder.has(key):
                try:
                    place = folder.place_of(key)
                except OSError:  # the page is there, but this process has too many files open
                    continue
                if place is not None:
                    return place
                self.drop_broken(key, folder)
        return None

    def drop_broken(self, key: bytes, folder: OtherFolder | None) -> None:
        """Count and remove a page whose place has other bytes, or cannot be read: a miss."""
        self._broken += 1
        if self._broken == 10 ** (len(str(self._broken)) - 1):
            logger.warning(
                "%d pages in %s are broken by now, and removed", self._broken, self._root
            )
        self.drop(key, folder)

    def note_failure(self, place: PageLocation, key: bytes) -> None:
        """Note a failed read. The page is broken if another worker has it, or if it fails again."""
        page = place.page
        if page is None or page.failed:
            self.drop_broken(key, place.folder)
        else:
            page.failed = True

    def drop(self, key: bytes, folder: OtherFolder | None) -> None:
        """Remove a page from its place, so that it is not looked for there again."""
        if folder is not None:
            folder.drop(key)
            return
        with self._writing():
            self._own.drop([key])

    def pin(self, place: PageLocation) -> None:
        """Note that a transfer uses a slot."""
        place.segment.begin()
        if place.page is not None:
            self._own.slots.pin(place.page)

    def unpin(self, place: PageLocation) -> None:
        """End one `pin`."""
        place.segment.end()
        if place.page is not None:
            self._own.slots.unpin(place.page)

    # Bytes

    def pieces(self, block: int, page: StoragePage, offset: int) -> list[FilePiece]:
        """Make the pieces of a slot's header and page, in memory and at `offset` in a segment."""
        pieces = []
        for address, nbytes in self.buffers.parts(block, page.slot):
            pieces.append(FilePiece(address, offset, nbytes))
            offset += nbytes
        return pieces

    def read(self, place: PageLocation, pieces: Sequence[FilePiece]) -> FileTransfer:
        """Begin to read from a segment."""
        return self._io.read(place.segment.file, pieces)

    # Writing

    def begin_write(self, pages: Sequence[StoragePage]) -> list[tuple[StoragePage, int]]:
        """Take slots for the pages that no worker has, as far as there is room."""
        if self._write_error and self._clock() < self._retry_at:
            return []
        missing = list({page.key: page for page in pages if not self.has(page.key)}.values())
        slots: list[int] = []
        with self._writing():
            slots = self._own.take(len(missing))
        return list(zip(missing, slots, strict=False))

    def start_writes(
        self, pages: Sequence[tuple[StoragePage, int]], blocks: Sequence[int]
    ) -> list[tuple[int, FileTransfer]]:
        """Write pages to slots, segment by segment. Returns each segment's file and transfer."""
        pieces: dict[int, list[FilePiece]] = {}
        for (page, slot), block in zip(pages, blocks, strict=True):
            self.buffers.write_header(block, page)
            segment, offset = self._own.segment_of(slot)
            pieces.setdefault(segment.file, []).extend(self.pieces(block, page, offset))
        return [(file, self._io.write(file, each)) for file, each in pieces.items()]

    def sync(self, files: Sequence[int]) -> Future[None]:
        """Begin to sync these files to the disk."""
        return self._sync.submit(_sync_all, files)

    def end_write(
        self,
        pages: Sequence[tuple[StoragePage, int]],
        cleared: Container[bytes],
        error: OSError | None,
    ) -> None:
        """End a write: let the pages be found if their bytes are safe, else free the slots.

        Slots of pages that were cleared meanwhile, or written by another operation, are freed, too.
        """
        fresh = []
        for page, slot in pages:
            if error is not None or page.key in cleared or self._own.has(page.key):
                self._own.slots.give_back(slot)
            else:
                fresh.append((slot, page.key, page.before))
        if error is not None:
            self._stop_writing(error)
            return
        with self._writing():
            self._own.publish(fresh)
            if self._write_error and fresh:
                logger.warning("%s is written again", self._own.path)
                self._write_error = ""

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop writing if the disk takes no more."""
        try:
            yield
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else str(error)
        if not self._write_error:
            logger.error("nothing more is written to %s: %s", self._own.path, reason)
        self._write_error = reason
        self._retry_at = self._clock() + RETRY_SECONDS


@dataclass(frozen=True, slots=True)
class _Reading:
    """One page on its way to the host."""

    index: int
    """Its place among the pages of its operation."""
    place: PageLocation
    block: int


class _Get:
    """An operation that reads pages, with one transfer for each segment."""

    def __init__(self, store: FileStore, pages: Sequence[StoragePage]) -> None:
        self._store = store
        self._pages = pages
        self._valid = [False] * len(pages)
        self._running: list[tuple[FileTransfer, list[_Reading]]] = []
        by_segment: dict[int, list[_Reading]] = {}
        for index, page in enumerate(pages):
            place = store.find(page.key)
            if place is None:
                continue
            store.pin(place)
            reading = _Reading(index, place, store.buffers.take(1)[0])
            by_segment.setdefault(place.segment.file, []).append(reading)
        for readings in by_segment.values():
            self._start(readings)

    def _start(self, readings: list[_Reading]) -> None:
        pieces: list[FilePiece] = []
        for one in readings:
            page = self._pages[one.index]
            pieces += self._store.pieces(one.block, page, one.place.offset)
        self._running.append((self._store.read(readings[0].place, pieces), readings))

    def poll(self) -> Sequence[bool] | None:
        """See `StoreOperation`."""
        for transfer, readings in list(self._running):
            moved = transfer.poll()
            if moved is None:
                continue
            self._running.remove((transfer, readings))
            if not moved and len(readings) > 1:
                for one in readings:  # one of them is why; each by itself
                    self._start([one])
                continue
            for one in readings:
                self._end(one, moved)
        return None if self._running else self._valid

    def _end(self, one: _Reading, moved: bool) -> None:
        store, page = self._store, self._pages[one.index]
        store.unpin(one.place)
        valid = self._valid[one.index] = moved and store.buffers.is_page(one.block, page)
        folder = one.place.folder
        if one.place.page is not None and moved:
            one.place.page.failed = False
        if not moved:
            store.note_failure(one.place, page.key)
        elif folder is not None and store.buffers.is_another_page(one.block) and not valid:
            store.drop(page.key, folder)  # its writer has reused the slot
        elif not valid:
            store.drop_broken(page.key, folder)
        store.buffers.give_back([one.block])


class _Put:
    """An operation that writes pages, makes them safe, and then lets them be found."""

    def __init__(self, store: FileStore, pages: Sequence[StoragePage]) -> None:
        self._store = store
        self._pages = pages
        self._writing = store.begin_write(pages)
        self._blocks = store.buffers.take(len(self._writing))
        self._running = store.start_writes(self._writing, self._blocks)
        self._files = [file for file, _ in self._running]
        self._safe: Future[None] | None = None
        self._failed = False
        self.ended = False
        self.cleared: set[bytes] = set()
        """The keys of pages that must not be kept after all."""

    def poll(self) -> Sequence[bool] | None:
        """See `StoreOperation`."""
        for one in list(self._running):
            moved = one[1].poll()
            if moved is not None:
                self._running.remove(one)
                self._failed |= not moved
        if self._running:
            return None
        if self._writing and not self._failed:
            if self._safe is None:
                self._safe = self._store.sync(self._files)
            if not self._safe.done():
                return None
        self._end()
        self.ended = True
        return [self._store.has(page.key) for page in self._pages]

    def _end(self) -> None:
        self._store.buffers.give_back(self._blocks)
        error: OSError | None = None
        if self._failed:
            error = OSError("not all bytes could be written; the disk may be full")
        elif self._safe is not None:
            failed = self._safe.exception()
            assert failed is None or isinstance(failed, OSError), failed
            error = failed
        if self._writing:
            self._store.end_write(self._writing, self.cleared, error)


def measure_reads(path: Path, memory: npt.NDArray[np.uint8], io: FileIO) -> float:
    """Measure the bytes a second that come from a file into memory, whose bytes do not change.

    Raises:
        OSError: the file could not be written, or read.
    """
    nbytes = min(memory.nbytes, _PROBE_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
        io.add_file(file, nbytes)
        try:
            pieces = [FilePiece(memory.ctypes.data, 0, nbytes)]
            _wait(io.write(file, pieces))
            os.fsync(file)
            os.posix_fadvise(file, 0, nbytes, os.POSIX_FADV_DONTNEED)
            begun = time.monotonic()
            _wait(io.read(file, pieces))
            return nbytes / max(time.monotonic() - begun, 1e-9)
        finally:
            io.remove_file(file)
    finally:
        os.close(file)
        path.unlink()


def _wait(transfer: FileTransfer) -> None:
    """Poll until the end. Raises OSError if not all bytes have moved."""
    while (moved := transfer.poll()) is None:
        time.sleep(50e-6)
    if not moved:
        raise OSError("not all bytes could be moved")


def _sync_all(files: Sequence[int]) -> None:
    for file in files:
        os.fdatasync(file)
