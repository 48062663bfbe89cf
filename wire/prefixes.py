"""What a worker tells a router of the prefixes that its prefix index has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixUpdate:
    """What is found on a worker, or no more, as marks (see `page_hash.py`).

    A mark is among the stored or the removed ones, not both.
    """

    number: int
    """Of the updates on one stream, from 0, one by one: so that a gap is seen."""
    page_size: int
    """Tokens a page: the marks are of such pages."""
    begins: bool = False
    """Nothing that was told before holds: this one and those that follow tell all anew."""
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
