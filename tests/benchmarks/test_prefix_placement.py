"""What the benchmark of placement replays, and that prefixes win on the public trace."""

from __future__ import annotations

import pytest

from benchmarks.prefix_placement import ENTRIES, Shape, measure, scaled
from kvrelay.deploy.load_generator.trace import TraceRow, read_trace

from .test_trace import public_trace


def test_rows_that_share_blocks_have_prompts_that_share_tokens():
    one, output = scaled(TraceRow(0.0, 1300, 80, (1, 2, 3)))
    other, _ = scaled(TraceRow(1.0, 1536, 3, (1, 2, 4)))
    assert (len(one), output) == (162, 10)
    assert len(other) == 192
    assert one[:128] == other[:128]
    assert one[128:] != other[128:162]


def test_what_is_told_of_a_replay():
    rows = [TraceRow(float(number), 1024, 16, (number % 2, 2 + number % 2)) for number in range(8)]
    figure = measure(rows, 1.0, Shape(pairs=2, pages=64), ENTRIES)
    # The first two prompts of two are computed, and the others' last token.
    assert figure.prefill_hits == pytest.approx(0.75 * 112 / 128)
    assert figure.ttft_p50_seconds < 0.04
    assert figure.placement == "prefixes"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_mooncake_trace_finds_its_first_tokens_earlier_by_prefixes():
    rows = read_trace(public_trace("mooncake_conversation_trace.jsonl.gz"), 1000)
    by_load, by_prefix = (measure(rows, 4.5, Shape(), entries) for entries in (0, ENTRIES))
    assert by_prefix.prefill_hits > 1.3 * by_load.prefill_hits
    assert by_prefix.ttft_mean_seconds < 0.9 * by_load.ttft_mean_seconds
    assert by_prefix.busiest_share < 0.35
