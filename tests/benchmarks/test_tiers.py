"""What the benchmark of the tiers replays and measures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tiers import measure_copies, measure_files, replay
from kvrelay.deploy.load_generator.trace import TraceRow


def test_what_does_not_fit_on_the_device_comes_back_in_a_replay():
    # Four conversations in turn; the device holds two of them.
    rows = [
        TraceRow(10.0 * at, 2048, 16, tuple(4 * (at % 4) + i for i in range(4))) for at in range(12)
    ]
    device, host, storage = (
        replay(rows, 1.0, 40, pages, 1e9, rate) for pages, rate in ((0, 0.0), (400, 0.0), (36, 1e9))
    )
    assert (device.hits, device.loaded_tokens) == (0, 0)
    assert host.hits > 0.6
    assert host.computed_tokens < 0.5 * device.computed_tokens
    assert host.ttft_mean_seconds < device.ttft_mean_seconds
    assert storage.stored_tokens
    assert storage.computed_tokens < 0.5 * device.computed_tokens


def test_all_copies_are_measured():
    rates = list(measure_copies(8, 2))
    assert [rate.what for rate in rates][:3] == ["plain copy", "to the host", "from the host"]
    assert all(rate.gigabytes_per_second > 0 for rate in rates)


def test_all_ways_to_files_are_measured(tmp_path: Path):
    rates = {rate.what: rate.gigabytes_per_second for rate in measure_files(tmp_path, 2)}
    ways = ["to files", "plain write", "from files", "plain read"]
    assert list(rates) == [*ways, "from files, cached", "plain read, cached"]
    assert all(rate > 0 for rate in rates.values())
