"""The progress of requests on a worker, for people who watch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestPhase(StrEnum):
    """The phase of a request on its worker."""

    QUEUED = "queued"
    """It holds nothing."""
    ASKED = "asked"
    """The prefill side has asked for memory, and the decode side has not granted it."""
    GRANTED = "granted"
    """The decode side has memory for the whole input, and no page was announced yet."""
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
    """The progress of one attempt; of several choices, that of the first that has not ended."""

    attempt: int
    phase: RequestPhase
    pages: int = 0
    """Pages of its whole input, in the first pool."""
    written_pages: int = 0
    """Pages that are computed here."""
    announced_pages: int = 0
    """Prefill side: pages that the decode side may read."""
    pulled_pages: int = 0
    """Decode side: pages whose reads have ended well."""
    owned_pages: int = 0
    """Decode side: pages found in its prefix index; once all pages are confirmed, all pages."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Some of a worker's requests; those that do not generate yet come first."""

    requests: tuple[RequestProgress, ...]
