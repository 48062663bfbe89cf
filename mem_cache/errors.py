"""What this room raises. Shortage is no error: it is a value, `None` or `False`."""

from __future__ import annotations


class KVCacheError(Exception):
    """A caller asked for what may never be, such as growing a closed lease."""


class ConservationError(KVCacheError):
    """Pages or rows were lost, or owned twice. Names a page and its last owners."""
