"""The faults of this room. Shortage is not among them: it is a value, `None` or `False`."""

from __future__ import annotations


class LedgerError(Exception):
    """A caller asked for what may never be, such as growing a closed lease."""


class ConservationError(LedgerError):
    """Pages or rows were lost, or owned twice. Names a page and its last owners."""
