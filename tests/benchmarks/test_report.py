from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from kvrelay.deploy.load_generator.load_client import PhaseSeconds
from kvrelay.deploy.load_generator.load_report import Slo, Stats, summarise, tpot
from kvrelay.deploy.load_generator.table import render, table
from kvrelay.deploy.load_generator.workload import ClosedLoop, Job, Workload
from tests.known import known


def workload(requests: int) -> Workload:
    jobs = tuple(Job(index, 5, 11) for index in range(requests))
    return Workload("5/11", ClosedLoop(4), jobs, (0, 0))


def test_percentiles_interpolate_linearly_and_are_milliseconds():
    stats = Stats.of(value / 1000 for value in range(1, 102))
    assert stats is not None
    assert stats.count == 101
    assert [stats.mean, stats.p50, stats.p90, stats.p95, stats.p99, stats.max] == pytest.approx(
        [51, 51, 91, 96, 100, 101]
    )
    assert known(Stats.of([0.010, 0.020])).p90 == pytest.approx(19)


def test_no_samples_have_no_statistics():
    assert Stats.of([]) is None


def test_latencies_of_a_plain_stream(record):
    report = summarise(workload(1), [record(first=0.1, gap=0.01, tokens=11, ended=0.25)], Slo())
    assert known(report.ttft_ms).mean == pytest.approx(100)
    assert (known(report.itl_ms).count, known(report.itl_ms).p99) == (10, pytest.approx(10))
    assert known(report.tpot_ms).mean == pytest.approx(10)
    assert known(report.e2e_ms).mean == pytest.approx(250)
    assert report.tokens_per_delta == 1
    assert report.slo is None


def test_itl_is_a_gap_between_deltas_and_tpot_is_per_token(record):
    chunks = record(token_times=(1.0, 1.4, 1.8), token_counts=(1, 4, 4), output_len=9, ended=1.8)
    report = summarise(workload(1), [chunks], Slo(itl_ms=60))
    assert known(report.itl_ms).mean == pytest.approx(400)
    assert known(report.tpot_ms).mean == pytest.approx(100)
    assert report.tokens_per_delta == 3
    assert known(report.slo).met == 0


def test_one_token_has_no_tpot_and_meets_any_itl_bound(record):
    single = record(tokens=1)
    assert tpot(single) is None
    report = summarise(workload(1), [single], Slo(ttft_ms=100, itl_ms=0))
    assert report.tpot_ms is None
    assert report.itl_ms is None
    assert known(report.slo).share == 1


def test_throughput_is_over_first_sent_to_last_ended(record):
    first = record(
        sent=1.0, ended=2.0, token_times=(1.5, 2.0), token_counts=(1, 9), cached_tokens=3
    )
    second = record(sent=2.0, ended=5.0, token_times=(3.0,), token_counts=(10,), index=1)
    report = summarise(workload(2), [first, second], Slo(), client_cpu_s=1.0)
    assert report.duration_s == 4.0
    assert report.output_tokens_per_s == 5.0
    assert report.requests_per_s == 0.5
    assert report.client_cpu_percent == 25.0
    assert (report.input_tokens, report.cached_tokens) == (10, 3)


def test_slo_is_joint_and_failures_and_rejections_miss_it(record):
    good = record(first=0.1, gap=0.01)
    late = record(first=0.3, gap=0.01)
    slow = record(first=0.1, gap=0.05)
    rejected = record(token_times=(), token_counts=(), ended=0.001, status="RESOURCE_EXHAUSTED")
    broken = record(first=0.1, gap=0.01, status="UNAVAILABLE")
    records = [good, late, slow, rejected, broken]
    both = summarise(workload(5), records, Slo(ttft_ms=200, itl_ms=20))
    assert (known(both.slo).met, known(both.slo).share) == (1, pytest.approx(0.2))
    assert known(both.slo).goodput_rps == pytest.approx(1 / both.duration_s)
    assert known(summarise(workload(5), records, Slo(ttft_ms=200)).slo).met == 2
    assert known(summarise(workload(5), records, Slo(itl_ms=20)).slo).met == 2


def test_failures_are_counted_by_status_and_left_out_of_latencies(record):
    failed = record(first=9.0, status="UNAVAILABLE")
    report = summarise(workload(5), [record(), failed, failed], Slo())
    assert asdict(report.requests) == {
        "planned": 5,
        "completed": 1,
        "failed": 2,
        "not_sent": 2,
        "failures": {"UNAVAILABLE": 2},
    }
    assert known(report.ttft_ms).count == 1
    assert report.output_tokens == 11


def test_send_lag_and_server_phases(record):
    phases = PhaseSeconds(0.1, 0.2, 0.3, 0.4)
    report = summarise(workload(1), [record(due=1.0, sent=1.5, phases=phases)], Slo())
    assert known(report.send_lag_ms).max == pytest.approx(500)
    assert [known(report.phases_ms[p]).mean for p in report.phases_ms] == pytest.approx(
        [100, 200, 300, 400]
    )


@pytest.mark.parametrize("records", [[], ["failed"]], ids=["nothing sent", "nothing completed"])
def test_an_empty_run_still_has_a_report_in_every_form(record, records):
    made = [record(token_times=(), token_counts=(), status="UNAVAILABLE") for _ in records]
    report = summarise(workload(1), made, Slo(ttft_ms=1))
    json.dumps(asdict(report), allow_nan=False)
    assert report.output_tokens_per_s == 0
    assert known(report.slo).share == 0
    assert "0 of 1 requests completed" in render([report])
    assert "5/11" in render([report, report])


def test_tables_name_what_went_wrong(record):
    report = summarise(workload(3), [record(status="UNAVAILABLE"), record()], Slo(ttft_ms=200))
    for text in (render([report]), render([report, report])):
        assert "1 failed (1 UNAVAILABLE)" in text
        assert "time ran out, 1 of 3 were not sent" in text
    assert "50.0% of requests sent" in render([report])
    assert "SLO met" in render([report, report])


def test_table_is_markdown_with_aligned_columns():
    lines = table(("a", "long"), [("row 1", "1"), ("r", "22")]).splitlines()
    assert lines == [
        "| a     | long |",
        "| ----- | ---: |",
        "| row 1 |    1 |",
        "| r     |   22 |",
    ]
