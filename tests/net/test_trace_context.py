"""W3C's traceparent header."""

from __future__ import annotations

import pytest

from kvrelay.observe.trace_context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True)])
def test_a_header_is_read_and_written(flags: str, sampled: bool) -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)
    assert str(context) == f"00-{TRACE}-{SPAN}-{sampled:02x}"


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01-{'m' * 10_000}",
    ],
)
def test_what_is_no_header_is_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_child_is_a_new_span_of_the_same_trace() -> None:
    parent = TraceContext.parse(f"00-{TRACE}-{SPAN}-01")
    assert parent is not None
    child = parent.child()
    assert (child.trace_id, child.sampled) == (parent.trace_id, True)
    assert child.span_id not in (parent.span_id, parent.child().span_id)
    assert len(child.span_id) == 8
