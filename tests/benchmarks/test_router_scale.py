from __future__ import annotations

import cProfile

import pytest

from benchmarks.router_scale.__main__ import by_component
from benchmarks.router_scale.bench import measure
from benchmarks.router_scale.load import Load

pytestmark = pytest.mark.slow  # it tests a benchmark, and `make test-all` runs it


def test_every_request_is_answered_and_loads_are_few():
    load = Load(20, 100.0, output_tokens=4, seconds=1.0)
    profile = cProfile.Profile()
    figure = measure(load, profile)
    assert 50 < figure.requests < 150
    assert figure.tokens == pytest.approx(5 * figure.requests, rel=0.2)  # and each one's end
    assert 0 < figure.loads <= 11 * load.workers * load.seconds
    assert 0 < figure.cores < 10
    assert "router/placement/worker_link.py" in dict(by_component(profile))


def test_loads_that_are_told_at_every_step_are_many_more():
    paced, at_once = (
        measure(Load(8, 200.0, output_tokens=64, seconds=0.5, paced=paced))
        for paced in (True, False)
    )
    assert paced.loads < at_once.loads / 3
    assert paced.wait_ms_mean == pytest.approx(at_once.wait_ms_mean, rel=0.3, abs=1.0)
