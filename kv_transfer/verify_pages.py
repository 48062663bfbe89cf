"""Which pages are compared after they were read; a process that only chooses needs no tensors."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from enum import StrEnum

from kvrelay.wire.hand_over import PagePlace, PageSum

logger = logging.getLogger(__name__)

SAMPLED_PART = 16
"""With `VerifyPages.SAMPLE` one page in so many is compared, and at least one."""


class VerifyPages(StrEnum):
    """Which of a request's pages are compared after they were read."""

    OFF = "off"
    SAMPLE = "sample"
    """Some, chosen by the request's id, so that a repeated attempt compares the same ones."""
    ALL = "all"
    """Every page of every pool."""


def choose(mode: VerifyPages, places: Sequence[PagePlace], request_id: str) -> list[PagePlace]:
    """Those of the pages that were read whose checksums are to be compared."""
    match mode:
        case VerifyPages.OFF:
            return []
        case VerifyPages.ALL:
            return list(places)
        case VerifyPages.SAMPLE:
            first = zlib.crc32(request_id.encode()) % max(1, min(len(places), SAMPLED_PART))
            return list(places[first::SAMPLED_PART])


def count_mismatches(own: Sequence[PageSum], theirs: Sequence[PageSum]) -> int:
    """Pages that a peer has read and that differ; both sides name them in the same order."""
    differ = [mine.place for mine, other in zip(own, theirs, strict=True) if mine != other]
    if differ:
        pages = ", ".join(f"page {page} of pool {pool}" for pool, page in differ)
        logger.error("a worker has read other bytes than are here: %s", pages)
    return len(differ)
