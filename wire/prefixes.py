"""A worker's reports to a router of the prefixes that its prefix index has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixUpdate:
    """Prefixes that are now in a worker's index, or no longer, as marks (see `page_hash.py`).

    A mark is among the stored or the removed ones, not both.
    """

    number: int
    """The update's number on its stream: 0, 1, 2 and so on, so that a gap is seen."""
    page_size: int
    """Tokens a page, for the pages that the marks name."""
    begins: bool = False
    """Earlier updates no longer hold: this one and those after it tell everything anew."""
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
