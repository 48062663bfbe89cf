"""What the benchmark of the host tier replays and measures."""

from __future__ import annotations

from benchmarks.tiers import measure_copies, replay
from kvrelay.deploy.load_generator.trace import TraceRow


def test_what_does_not_fit_on_the_device_comes_back_in_a_replay():
    # Four conversations in turn; the device holds two of them.
    rows = [
        TraceRow(10.0 * at, 2048, 16, tuple(4 * (at % 4) + i for i in range(4))) for at in range(12)
    ]
    device, host = (replay(rows, 1.0, 40, pages, 1e9) for pages in (0, 400))
    assert (device.hits, device.loaded_tokens) == (0, 0)
    assert host.hits > 0.6
    assert host.computed_tokens < 0.5 * device.computed_tokens
    assert host.ttft_mean_seconds < device.ttft_mean_seconds


def test_all_copies_are_measured():
    rates = list(measure_copies(8, 2))
    assert [rate.what for rate in rates][:3] == ["plain copy", "to the host", "from the host"]
    assert all(rate.gigabytes_per_second > 0 for rate in rates)
