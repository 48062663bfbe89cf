"""The trace that a request belongs to, as W3C's `traceparent` header carries it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

HEADER: Final = "traceparent"
"""The name of an HTTP header, and of a key of gRPC's metadata."""
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01
_MOST_CHARACTERS: Final = 256
"""The longest header that is parsed; later versions of the form may be longer than this one."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's ids, for processes that make spans below it."""

    trace_id: bytes
    """16 bytes, not all zero."""
    span_id: bytes
    """8 bytes, not all zero."""
    sampled: bool
    """Whether spans of the trace are recorded."""

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"

    @staticmethod
    def parse(header: str) -> TraceContext | None:
        """Parse a header; None: it is not valid by W3C's rules, and is to be ignored."""
        found = _FORM.fullmatch(header) if len(header) <= _MOST_CHARACTERS else None
        if found is None:
            return None
        version, trace, span, flags, more = found.groups()
        if version == "ff" or (version == "00" and more):
            return None
        trace_id, span_id = bytes.fromhex(trace), bytes.fromhex(span)
        if not any(trace_id) or not any(span_id):
            return None
        return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    def child(self) -> TraceContext:
        """Make a new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled)


def new_trace_id() -> bytes:
    """A random trace id."""
    return os.urandom(16)


def new_span_id() -> bytes:
    """A random span id."""
    return os.urandom(8)
