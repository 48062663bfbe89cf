"""The owner of each page of a worker, for people who look for one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnedPages:
    """Neighbouring pages of one owner."""

    first_page: int
    num_pages: int
    owner: str
    """``free``, ``lease``, ``index``, ``session`` or ``quarantine``."""
    holder: str
    """The request or session; empty for free pages and pages of the index."""


@dataclass(frozen=True, slots=True)
class PoolOwners:
    """All pages of one pool."""

    pool: str
    runs: tuple[OwnedPages, ...]
    """All of its pages, each once and in order."""


@dataclass(frozen=True, slots=True)
class PageOwners:
    """All pages of a worker, at one moment between two steps."""

    pools: tuple[PoolOwners, ...]
