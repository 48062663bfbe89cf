from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import memory

TINY = memory.Sizes(
    total_pages=400,
    prefixes=12,
    sharing=4,
    prefix_tokens=160,
    prompt_tokens=320,
    turns=2,
    requests=8,
    calls=4,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Sizes", lambda: TINY)


def test_it_prints_how_each_figure_compares_to_its_bar():
    result = CliRunner().invoke(memory.main, ["--repetitions", "1"])
    assert result.exit_code == 0, result.output
    lines = [line.split("|") for line in result.output.splitlines()]
    ratios = {line[1].strip(): line[6].strip() for line in lines}
    assert float(ratios["match 320 tokens, 160 of them cached"]) > 0
    assert float(ratios["decode step, hybrid"]) > 0
    assert ratios["audit, full"] == "-"


def test_json_has_the_same_figures():
    result = CliRunner().invoke(memory.main, ["--quick", "--json"])
    figures = json.loads(result.output)["figures"]
    for figure in figures:
        assert 0 < figure["min_us"] <= figure["median_us"]
        bar = figure["bar_us"]
        assert figure["ratio"] == (None if bar is None else figure["median_us"] / bar)
    assert sum(figure["bar_us"] is not None for figure in figures) == 6


def test_check_fails_where_a_bar_is_missed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "MATCH_BAR_US", 1e-3)
    result = CliRunner().invoke(memory.main, ["--quick", "--check"])
    assert result.exit_code == 1
    assert "too slow: match" in result.output
