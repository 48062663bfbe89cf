"""The choice of pages to compare after they were read. Choosing alone needs no tensors."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from enum import StrEnum

from kvrelay.wire.hand_over import PagePlace, PageSum

logger = logging.getLogger(__name__)

SAMPLED_PART = 16
"""The number of pages of which `VerifyPages.SAMPLE` compares one; it compares at least one in
all."""


class VerifyPages(StrEnum):
    """The choice of a request's pages that are compared after they were read."""

    OFF = "off"
    SAMPLE = "sample"
    """Some pages, chosen by the request's id, so that a repeated attempt compares the same ones."""
    ALL = "all"
    """Every page of every pool."""


def choose(mode: VerifyPages, places: Sequence[PagePlace], request_id: str) -> list[PagePlace]:
    """Choose those of the pages read whose checksums are to be compared."""
    match mode:
        case VerifyPages.OFF:
            return []
        case VerifyPages.ALL:
            return list(places)
        case VerifyPages.SAMPLE:
            first = zlib.crc32(request_id.encode()) % max(1, min(len(places), SAMPLED_PART))
            return list(places[first::SAMPLED_PART])


def count_mismatches(own: Sequence[PageSum], theirs: Sequence[PageSum]) -> int:
    """Count the pages that differ from what a peer has read; both lists have the same order."""
    differ = [mine.place for mine, other in zip(own, theirs, strict=True) if mine != other]
    if differ:
        pages = ", ".join(f"page {page} of pool {pool}" for pool, page in differ)
        logger.error("a worker has read other bytes than are here: %s", pages)
    return len(differ)
