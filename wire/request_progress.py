"""How far requests have come on a worker, for people who watch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestPhase(StrEnum):
    """Where a request is on its worker."""

    QUEUED = "queued"
    """It holds nothing."""
    ASKED = "asked"
    """The prefill side has asked for memory, and the decode side has not granted it."""
    GRANTED = "granted"
    """The decode side has memory for the whole input, and nothing of it was announced."""
    COMPUTING = "computing"
    """Its input is computed here."""
    ANNOUNCED = "announced"
    """Prefill side: all of its pages are announced, and the decode side reads."""
    READING = "reading"
    """Decode side: announced pages are read."""
    DECODING = "decoding"
    """It generates."""


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """One attempt at a request; of several choices it is the first that has not ended."""

    attempt: int
    phase: RequestPhase
    pages: int = 0
    """Of its whole input, of the first pool."""
    written_pages: int = 0
    """That are computed here."""
    announced_pages: int = 0
    """Prefill side: that the decode side may read."""
    pulled_pages: int = 0
    """Decode side: whose reads have ended well."""
    owned_pages: int = 0
    """Decode side: that are its own: found in its prefix index, or all once they are confirmed."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Some of a worker's requests; those that do not generate yet come first."""

    requests: tuple[RequestProgress, ...]
