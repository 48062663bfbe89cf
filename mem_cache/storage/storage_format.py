"""The layout of a store of files on disk, down to its bytes. All numbers are little-endian.

::

    writer-0/
      lock               held by the worker that may write in this folder
      index              a header, then records: page K is in slot N, or is there no more
      segment-000000     a header, then slots of one size
        | header | slot 0: header, tokens, the page of each pool | slot 1 | ...

A slot and its parts begin at multiples of `ALIGNMENT`. Its header says whose bytes they are, with a
checksum of them and one of its own. A reader of a slot believes nothing else.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from kvrelay.mem_cache.storage.storage_pages import StoragePage

ALIGNMENT: Final = 4096
SEGMENT_BYTES: Final = 256 << 20
"""The most bytes of a segment's slots together, unless one slot is larger."""
_VERSION: Final = 1
_FILE_MAGIC: Final = b"kvrelayF"
_SLOT_MAGIC: Final = b"kvrelayP"
_FILE: Final = struct.Struct("<8sII32sQQ")
"""Magic, CRC-32 of what follows, version, layout, bytes of a slot, slots of a segment."""
_SLOT: Final = struct.Struct("<8sII32s32s32sQQI")
"""Magic, CRC-32 of the rest with the tokens, version, layout, key, key of the page before. Then
bytes of the page, their checksum, bytes of its tokens."""
_CHECKED_FROM: Final = 12
"""The position after magic and CRC-32."""
_RECORD: Final = struct.Struct("<IIQ32s32s")
"""CRC-32 of what follows, kind, slot, key, key of the page before."""
RECORD_BYTES: Final = _RECORD.size
_PUT: Final = 1
_DROP: Final = 2


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """One record of the index: from here on a slot has a page, or has none."""

    slot: int
    key: bytes
    """The key of the page that it has, or had."""
    before: bytes
    """The key of the page before that."""
    is_there: bool = True

    def pack(self) -> bytes:
        """Pack it into `RECORD_BYTES`."""
        kind = _PUT if self.is_there else _DROP
        body = _RECORD.pack(0, kind, self.slot, self.key, self.before)[4:]
        return struct.pack("<I", zlib.crc32(body)) + body

    @classmethod
    def unpack(cls, packed: bytes) -> IndexRecord | None:
        """Unpack the record in `RECORD_BYTES`; None if it is none, or was not written whole."""
        crc, kind, slot, key, before = _RECORD.unpack(packed)
        if crc != zlib.crc32(packed[4:]) or kind not in (_PUT, _DROP):
            return None
        return cls(slot, key, before, kind == _PUT)


class StorageFormat:
    """The sizes and headers of one layout of pages.

    Args:
        layout: 32 bytes that differ wherever the bytes of equal tokens could differ.
        token_bytes: of a page's token ids.
        page_bytes: of a page, over all pools.
    """

    def __init__(self, layout: bytes, token_bytes: int, page_bytes: int) -> None:
        self.token_bytes = token_bytes
        self.page_bytes = page_bytes
        self.header_bytes = _aligned(_SLOT.size + token_bytes)
        """The bytes of a slot's header, before its page."""
        self.slot_bytes = self.header_bytes + _aligned(page_bytes)
        self.segment_slots = max(1, (SEGMENT_BYTES - ALIGNMENT) // self.slot_bytes)
        self.name = layout.hex()[:16]
        """The name of the layout, for folders and objects."""
        self._layout = layout
        body = _FILE.pack(b"", 0, _VERSION, layout, self.slot_bytes, self.segment_slots)
        checked = body[_CHECKED_FROM:]
        self.file_header = _FILE_MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked
        """The first bytes of the index, and of every segment."""

    def offset_of(self, slot: int) -> tuple[int, int]:
        """Find the segment of a slot, and the slot's offset there."""
        segment, place = divmod(slot, self.segment_slots)
        return segment, ALIGNMENT + place * self.slot_bytes

    def segment_bytes(self, slots: int) -> int:
        """Compute the size of a segment of `slots` slots."""
        return ALIGNMENT + slots * self.slot_bytes

    def slots_in(self, nbytes: int) -> int:
        """Count the slots that are whole in a segment's file of this size."""
        return min(max(0, nbytes - ALIGNMENT) // self.slot_bytes, self.segment_slots)

    def pack_slot(self, page: StoragePage, checksum: int) -> bytes:
        """Pack a slot's header, shorter than `header_bytes`; the rest of these is never read."""
        numbers = page.key, page.before, self.page_bytes, checksum, len(page.tokens)
        packed = _SLOT.pack(b"", 0, _VERSION, self._layout, *numbers) + page.tokens
        checked = packed[_CHECKED_FROM:]
        return _SLOT_MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked

    def is_header(self, header: bytes) -> bool:
        """Whether it is a slot's header, of any page."""
        magic, crc, _, layout, *_ = _SLOT.unpack_from(header)
        checked = header[_CHECKED_FROM : _SLOT.size + self.token_bytes]
        return bool(magic == _SLOT_MAGIC and layout == self._layout and crc == zlib.crc32(checked))

    def checksum_in(self, header: bytes, page: StoragePage) -> int | None:
        """Get the page's checksum from a slot's header; None: the header is not this page's."""
        magic, _, _, _, _, _, _, checksum, _ = _SLOT.unpack_from(header)
        expected = self.pack_slot(page, checksum)
        return checksum if magic == _SLOT_MAGIC and header.startswith(expected) else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
