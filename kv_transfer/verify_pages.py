"""Which pages are compared after they were read; a process that only chooses needs no tensors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import StrEnum

from kvrelay.wire.hand_over import Place

SAMPLED_PART = 16
"""With `VerifyPages.SAMPLE` one page in so many is compared, and at least one."""


class VerifyPages(StrEnum):
    """Which of a request's pages are compared after they were read."""

    OFF = "off"
    SAMPLE = "sample"
    """Some, chosen by the request's id, so that a repeated attempt compares the same ones."""
    ALL = "all"
    """Every page of every pool."""


def choose(mode: VerifyPages, places: Sequence[Place], request_id: str) -> list[Place]:
    """Those of the pages that were read whose checksums are to be compared."""
    match mode:
        case VerifyPages.OFF:
            return []
        case VerifyPages.ALL:
            return list(places)
        case VerifyPages.SAMPLE:
            first = zlib.crc32(request_id.encode()) % max(1, min(len(places), SAMPLED_PART))
            return list(places[first::SAMPLED_PART])
