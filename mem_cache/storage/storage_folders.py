"""The folders of a store of files: each is written by one worker, and read by all.

A worker takes the first folder that no other holds, with its content. So a worker's pages go to its
successor, and there are no more folders than there were workers at a time. A folder is held by a
lock on a file, which the system releases when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.mem_cache.storage.file_io import FileIO
from kvrelay.mem_cache.storage.storage_format import ALIGNMENT, IndexRecord, StorageFormat
from kvrelay.mem_cache.storage.storage_index import INDEX, IndexReader, IndexWriter
from kvrelay.mem_cache.storage.storage_slots import StorageSlots, StoredPage

logger = logging.getLogger(__name__)

_PREFIX: Final = "writer-"
_MOST_WRITERS: Final = 4096


class SegmentFile:
    """An open segment. It is closed once it is no longer wanted and no transfer uses it."""

    def __init__(self, path: Path, flags: int, io: FileIO, nbytes: int) -> None:
        """Open it. `nbytes` of it may be used. Raises OSError."""
        self.path = path
        self.file = os.open(path, flags, 0o600)
        self._io = io
        self._users = 0
        self._wanted = True
        try:
            io.add_file(self.file, nbytes)
        except BaseException:
            os.close(self.file)
            raise

    @property
    def nbytes(self) -> int:
        """The size of the file now. Raises OSError."""
        return os.fstat(self.file).st_size

    def begin(self) -> None:
        """Note that a transfer uses it."""
        self._users += 1

    def end(self) -> None:
        """End one `begin`."""
        self._users -= 1
        self._close_if_unused()

    def close(self) -> None:
        """Close it after its running transfers; no further one may begin."""
        self._wanted = False
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._users and not self._wanted:
            self._io.remove_file(self.file)
            os.close(self.file)


@dataclass(frozen=True, slots=True)
class PageLocation:
    """The place of a page."""

    segment: SegmentFile
    offset: int
    page: StoredPage | None
    """The page's entry if it is in this process's own folder; None: it is in another's."""
    folder: OtherFolder | None


class OtherFolder:
    """A folder that another worker writes, or has written. Any fault there is a miss."""

    def __init__(self, path: Path, layout: StorageFormat, io: FileIO) -> None:
        self._path = path
        self._format = layout
        self._io = io
        self._index = IndexReader(path, layout)
        self._opened = 0
        self._segments: dict[int, SegmentFile] = {}
        self._said = ""

    def refresh(self) -> None:
        """Read the changes that its writer has made since."""
        try:
            self._index.refresh()
        except OSError as error:
            self._warn(error)
            self._index.close()
        if self._index.times_opened != self._opened:
            self._opened = self._index.times_opened
            self._close_segments()

    def has(self, key: bytes) -> bool:
        """Whether it should have a page."""
        return key in self._index.pages.by_key

    def before(self, key: bytes) -> bytes | None:
        """Get the key of the page before one that it should have; None: it should not have it."""
        record = self._index.pages.by_key.get(key)
        return None if record is None else record.before

    def place_of(self, key: bytes) -> PageLocation | None:
        """Find where a page should be; None: not here.

        Raises OSError if this process has too many files open.
        """
        record = self._index.pages.by_key.get(key)
        if record is None:
            return None
        number, offset = self._format.offset_of(record.slot)
        try:
            segment = self._segments.get(number) or self._open(number)
            if segment.nbytes < offset + self._format.slot_bytes:
                raise EOFError("the segment is cut off")
        except (OSError, EOFError) as error:
            self._warn(error)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None
        return PageLocation(segment, offset, None, self)

    def _warn(self, error: Exception) -> None:
        """Log an error, unless it is the one that was logged last."""
        if str(error) != self._said:
            self._said = str(error)
            logger.warning("%s cannot be read: %s", self._path, error)

    def drop(self, key: bytes) -> None:
        """Forget a page whose place has other bytes, so that it is not looked for there again."""
        self._index.pages.forget(key)

    def close(self) -> None:
        """Close the files."""
        self._index.close()
        self._close_segments()

    def _open(self, number: int) -> SegmentFile:
        nbytes = self._format.segment_bytes(self._format.segment_slots)
        path = self._path / segment_name(number)
        segment = self._segments[number] = SegmentFile(path, os.O_RDONLY, self._io, nbytes)
        return segment

    def _close_segments(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class OwnFolder:
    """The folder that this process writes.

    Args:
        root: of all folders of one layout; made if it is not there.
        layout: of the slots.
        slots: the number of slots.
        page_size: tokens a page.
        io: moves bytes.

    Raises:
        OSError: it cannot be written, or locked.
    """

    def __init__(
        self, root: Path, layout: StorageFormat, slots: int, page_size: int, io: FileIO
    ) -> None:
        self.slots = StorageSlots(slots, page_size)
        """The account of its slots."""
        self.broken = 0
        """The number of the index's pages whose bytes are missing, and of its broken records."""
        self._format = layout
        self._io = io
        self._segments: dict[int, SegmentFile] = {}
        self._allocated: dict[int, int] = {}
        """The number of slots that each segment's file has room for."""
        self.path, self._lock = _claim(root)
        self._index = IndexWriter(self.path, layout)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> None:
        found = self._index.recover()
        if found is None:
            for path in (*self.path.glob(f"{INDEX}*"), *self.path.glob("segment-*")):
                path.unlink()
            self._index.rewrite(())
            return
        (self.path / f"{INDEX}.new").unlink(missing_ok=True)
        is_whole = self._open_segments()
        valid = [one for one in found.by_key.values() if self._has(one.slot)]
        self.broken = self._index.broken + len(found.by_key) - len(valid)
        self.slots.adopt((one.slot, one.key, one.before) for one in valid)
        if self.broken or not is_whole:
            self._index.rewrite(self.slots)

    def _open_segments(self) -> bool:
        """Open the segments that are right; remove the others, if there are any.

        Returns:
            Whether there were no others. If there were, other workers may have them open. The index
            must then be a new file, so that they open all segments anew.
        """
        is_whole = True
        for path in sorted(self.path.glob("segment-*")):
            number, wanted = _segment_number(path), 0
            if number is not None:
                wanted = self._slots_wanted(number)
            if number is None or wanted <= 0 or not self._is_segment(path):
                path.unlink()
                is_whole = False
                continue
            segment = self._open(number)
            self._allocated[number] = min(self._format.slots_in(segment.nbytes), wanted)
            if segment.nbytes > self._format.segment_bytes(wanted):
                os.ftruncate(segment.file, self._format.segment_bytes(wanted))
        return is_whole

    def _is_segment(self, path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(self._format.file_header)) == self._format.file_header

    def _slots_wanted(self, number: int) -> int:
        """Compute how many slots a segment should have."""
        rest = self.slots.total - number * self._format.segment_slots
        return min(rest, self._format.segment_slots)

    def _has(self, slot: int) -> bool:
        number, place = divmod(slot, self._format.segment_slots)
        return place < self._allocated.get(number, 0)

    def _open(self, number: int) -> SegmentFile:
        nbytes = self._format.segment_bytes(self._format.segment_slots)
        path = self.path / segment_name(number)
        flags = os.O_RDWR | os.O_CREAT
        segment = self._segments[number] = SegmentFile(path, flags, self._io, nbytes)
        return segment

    # Pages

    def has(self, key: bytes) -> bool:
        """Whether it has a page."""
        return self.slots.find(key) is not None

    def place_of(self, key: bytes) -> PageLocation | None:
        """Find the place of a page; None: not here."""
        page = self.slots.find(key)
        if page is None:
            return None
        number, offset = self._format.offset_of(page.slot)
        segment = self._segments[number]
        try:
            nbytes = segment.nbytes
        except OSError as error:
            logger.warning("a page in %s cannot be read: %s", self.path, error)
            return None
        if nbytes < offset + self._format.slot_bytes:
            self._allocated[number] = self._format.slots_in(nbytes)
            return None
        return PageLocation(segment, offset, page, None)

    def take(self, number: int) -> list[int]:
        """Take slots to write to, with room on the disk; fewer if the others are in use.

        Raises:
            OSError: there is no room, or the disk fails. No slot is taken then.
        """
        taken, evicted = self.slots.take(number)
        try:
            if evicted:  # else a crash would leave other pages' bytes under their keys
                self._index.append(IndexRecord(p.slot, p.key, p.before, False) for p in evicted)
            for slot in taken:
                self._allocate(slot)
        except OSError:
            for slot in taken:
                self.slots.give_back(slot)
            raise
        return taken

    def _allocate(self, slot: int) -> None:
        """Make the disk reserve the whole segment of a slot, if it has not yet. Raises OSError."""
        if self._has(slot):
            return
        number = slot // self._format.segment_slots
        segment = self._segments.get(number) or self._open(number)
        wanted, before = self._slots_wanted(number), segment.nbytes
        try:
            os.posix_fallocate(segment.file, 0, self._format.segment_bytes(wanted))
            os.pwrite(segment.file, self._format.file_header, 0)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(segment.file, before)
            raise
        self._allocated[number] = wanted

    def segment_of(self, slot: int) -> tuple[SegmentFile, int]:
        """Find the segment of a slot that was taken, and the offset there."""
        number, offset = self._format.offset_of(slot)
        return self._segments[number], offset

    def publish(self, pages: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Record the pages of slots that were taken: a slot, a key and that of the page before.

        Their bytes must be safe.

        Raises:
            OSError: the index could not be written. The slots are free.
        """
        todo = list(pages)[::-1]  # neighbours: the end of a prompt is to be evicted first
        try:
            self._index.append(IndexRecord(*one) for one in todo)
        except OSError:
            for slot, _, _ in todo:
                self.slots.give_back(slot)
            raise
        for slot, key, before in todo:
            self.slots.publish(slot, key, before)
        if self._index.is_long(len(self.slots)):
            self._index.rewrite(self.slots)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop pages and overwrite their slots' headers, so that no process believes in them.

        A successor does not, either, whatever became of the index.

        Raises:
            OSError: the first of the errors; all else was done. Other processes may still find some
                pages.
        """
        dropped = self.slots.drop_all(keys)
        errors: list[OSError] = []
        files = set()
        for page in dropped:
            segment, offset = self.segment_of(page.slot)
            with _noting(errors):
                os.pwrite(segment.file, bytes(ALIGNMENT), offset)
            files.add(segment.file)
        for file in files:
            with _noting(errors):
                os.fdatasync(file)
        with _noting(errors):
            self._tell_dropped(dropped)
        if errors:
            raise errors[0]

    def drop(self, keys: Iterable[bytes]) -> None:
        """Make these pages and their continuations unfindable.

        Raises:
            OSError: other processes may still find them.
        """
        self._tell_dropped(self.slots.drop_all(keys))

    def _tell_dropped(self, dropped: Sequence[StoredPage]) -> None:
        if dropped:
            self._index.append(IndexRecord(p.slot, p.key, p.before, False) for p in dropped)

    def close(self) -> None:
        """Close the files, and release the folder for another process."""
        self._index.close()
        for segment in self._segments.values():
            segment.close()
        os.close(self._lock)


@contextlib.contextmanager
def _noting(errors: list[OSError]) -> Iterator[None]:
    """Continue after an error, and remember it."""
    try:
        yield
    except OSError as error:
        errors.append(error)


def other_folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of other workers. Raises OSError."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name != own.name and _is_ours(entry):
                yield Path(entry.path)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder of this user, not a link; other users' files are not believed."""
    try:
        return entry.is_dir(follow_symlinks=False) and (
            entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )
    except OSError:
        return False


def _check_ours(path: Path) -> None:
    """Raise `PermissionError` unless it is a folder, not a link, that only this user can use."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user alone")


def segment_name(number: int) -> str:
    """Get the file name of a segment."""
    return f"segment-{number:06d}"


def _segment_number(path: Path) -> int | None:
    try:
        return int(path.name.removeprefix("segment-"))
    except ValueError:
        return None


def _claim(root: Path) -> tuple[Path, int]:
    """Take the first folder that no process holds. Returns it, and the locked descriptor.

    Raises:
        OSError: none can be made, or locks do not work there.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(root)
    for number in range(_MOST_WRITERS):
        path = root / f"{_PREFIX}{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:
            os.close(lock)
            raise
        return path, lock
    raise OSError(f"all of {_MOST_WRITERS} folders in {root} are in use")
