"""Metrics are declared in a table and exported under the names that it lists."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.observe.metric_declarations import Instruments, Metric, MetricTable, MetricType


def table() -> tuple[MetricTable, Metric, Metric, Metric]:
    made = MetricTable("model")
    return (
        made,
        made.counter("k_requests_total", "Requests", "outcome"),
        made.gauge("k_live", "Live requests"),
        made.histogram("k_seconds", "Seconds", (0.5, 1.0)),
    )


def exported(instruments: Instruments) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(instruments.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_table_lists_what_was_declared() -> None:
    made, requests, live, seconds = table()
    assert list(made) == [requests, live, seconds]
    assert (requests.name, requests.type, requests.help, requests.labels) == (
        "k_requests_total",
        MetricType.COUNTER,
        "Requests",
        ("model", "outcome"),
    )


def test_values_are_exported_with_the_common_labels() -> None:
    made, requests, live, seconds = table()
    instruments = Instruments(made, {"model": "m"})
    instruments.count(requests, 2, outcome="stop")
    instruments.count(requests, outcome="stop")
    instruments.show(requests, outcome="abort")
    instruments.watch(live, lambda: 7)
    instruments.observe(seconds, 0.7)
    values, model = exported(instruments), ("model", "m")
    assert values["k_requests_total", (model, ("outcome", "stop"))] == 3
    assert values["k_requests_total", (model, ("outcome", "abort"))] == 0
    assert values["k_live", (model,)] == 7
    assert values["k_seconds_bucket", (("le", "0.5"), model)] == 0
    assert values["k_seconds_bucket", (("le", "1.0"), model)] == 1


def test_a_metric_without_labels_of_its_own_is_there_at_zero() -> None:
    made, *_ = table()
    assert exported(Instruments(made, {"model": "m"}))["k_seconds_count", (("model", "m"),)] == 0


def test_a_label_that_was_not_declared_is_refused() -> None:
    made, requests, *_ = table()
    with pytest.raises(ValueError, match="label"):
        Instruments(made, {"model": "m"}).count(requests, reason="stop")


def test_what_one_thread_counts_often_is_exported_as_what_any_thread_may_count() -> None:
    own, ours = MetricTable("model"), MetricTable("model")
    names = ("k_tokens_total", "k_seconds")
    metrics = [
        (
            made.counter(names[0], "Tokens", lone=lone),
            made.histogram(names[1], "S", (0.5, 1), lone=lone),
        )
        for made, lone in ((own, False), (ours, True))
    ]
    plain, lone = (Instruments(made, {"model": "m"}) for made in (own, ours))
    assert exported(lone) == exported(plain)
    values = (0.5, 0.50001, 0.2, 7.0, 1.0)
    for value in values:
        plain.observe(metrics[0][1], value)
        lone.lone_histogram(metrics[1][1]).observe(value)
    plain.count(metrics[0][0], 3)
    lone.lone_counter(metrics[1][0]).add(3)
    assert exported(lone) == exported(plain)
    samples = [list(one.samples(two[1])) for one, two in zip((plain, lone), metrics, strict=True)]
    by_name = [{(s.name, s.labels.get("le")): s.value for s in found} for found in samples]
    assert by_name[1].items() <= by_name[0].items()  # Prometheus' own tells when it began, too
    assert len(by_name[1]) == 5


def test_a_collected_metric_is_left_to_its_collector() -> None:
    made = MetricTable("model")
    pages = made.collected(MetricType.GAUGE, "k_pages", "Pages by state", "state")
    assert pages.labels == ("model", "state")
    assert exported(Instruments(made, {"model": "m"})) == {}
