"""The errors of this room. Shortage is no error: it is a value, `None` or `False`."""

from __future__ import annotations


class KVCacheError(Exception):
    """An error of a caller that asked for what may never be, such as growing a closed lease."""


class ConservationError(KVCacheError):
    """An error of lost pages or rows, or of two owners. Names a page and its last owners."""
