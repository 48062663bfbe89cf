"""The phases of a request on its worker: for traces, faults on demand and people who watch.

`Request.enter` is called wherever a request comes to a phase.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The phases of a request on its worker, and of the worker's work below it."""

    QUEUED = "queued"
    """The request has come, and holds nothing."""
    ASKED = "asked"
    """The prefill side has asked for memory, and the decode side has not granted it."""
    GRANTED = "granted"
    """The decode side has memory for the whole input."""
    PREFILLING = "prefilling"
    """The request has memory where its prompt is computed, and its first chunk is next."""
    BORROWING = "borrowing"
    """Pages of a prompt were lent (decode side), or their read was ordered (prefill side)."""
    LENDING = "lending"
    """Pages of the prefill side's host were announced there, or are to be read from there."""
    ANNOUNCED = "announced"
    """Pages were announced (prefill side), or their announcement has come (decode side)."""
    PULLING = "pulling"
    """Decode side: a read was ordered."""
    PULLED = "pulled"
    """Decode side: all is read, the verdict is awaited."""
    DECODING = "decoding"
    """The request begins to generate."""
    RETRACTED = "retracted"
    """The request was retracted."""
    SAVING = "saving"
    """A turn has ended well, and its session is to keep its KV."""
    PREFETCHING = "prefetching"
    """A copy from the host was begun, for a request that waits."""
    WRITING_BACK = "writing_back"
    """A copy to the host was begun."""
    DRAINING = "draining"
    """The worker takes nothing new."""
    STORING = "storing"
    """Pages of the host were ordered to be written to storage; this phase has no request."""
    FETCHING = "fetching"
    """Pages were ordered to be read from storage."""
