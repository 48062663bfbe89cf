"""What the controller counts of its workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.deploy.controller.records.ordered_changes import Replacement, Revision, Roll
from kvrelay.deploy.controller.supervision.controller_metrics import METRICS, ControllerMetrics
from kvrelay.deploy.controller.supervision.membership import Membership
from kvrelay.deploy.nodes.worker_end import WorkerEnd
from kvrelay.mem_cache.errors import ConservationError
from kvrelay.wire.worker_info import WorkerRole
from tests.worker_infos import worker_info

FIRST = worker_info()
SECOND = replace(FIRST, incarnation="decode-0-2")


def test_every_listed_metric_is_exported_under_its_name() -> None:
    listed = {(metric.name.removesuffix("_total"), metric.type.value) for metric in METRICS}
    metrics = ControllerMetrics("m", Membership().discovery, list)
    assert {(one.name, one.type) for one in metrics.registry.collect()} == listed


def test_a_worker_that_drains_and_dies_twice():
    members = Membership()
    metrics = ControllerMetrics("m", members.discovery, lambda: [WorkerRole.DECODE])
    served = CollectorRegistry(auto_describe=True)
    served.register(metrics.registry)

    def value(name: str, **labels: str) -> float | None:
        return served.get_sample_value(name, {"model": "m", "role": "decode", **labels})

    def ends(cause: WorkerEnd) -> float | None:
        return value("kvrelay_worker_ends_total", worker="decode-0", cause=cause)

    for _ in range(2):  # the second time after a false alarm
        metrics.started(FIRST)
    members.add_live(FIRST)
    # From zero, so that Prometheus sees the first one come.
    assert [ends(cause) for cause in WorkerEnd] == [0] * len(WorkerEnd)
    assert value("kvrelay_workers", state="ready") == 1
    for _ in range(2):
        metrics.draining(FIRST)
    members.add_draining(FIRST)
    assert value("kvrelay_workers", state="ready") == 0
    assert value("kvrelay_workers", state="draining") == 1
    members.remove_live(FIRST)
    members.add_dead(FIRST)
    metrics.ended(FIRST, WorkerEnd.DRAINED)
    metrics.draining(FIRST)  # somebody says so late
    metrics.started(SECOND)
    members.add_live(SECOND)
    members.remove_live(SECOND)
    metrics.ended(SECOND, WorkerEnd.CONSERVATION)
    assert ends(WorkerEnd.DRAINED) == ends(WorkerEnd.CONSERVATION) == 1
    assert value("kvrelay_worker_starts_total", worker="decode-0") == 2
    assert value("kvrelay_worker_drains_total", worker="decode-0") == 1
    assert value("kvrelay_workers", state="restarting") == value("kvrelay_workers_wanted") == 1


def test_the_cause_of_a_failure():
    said = f"{type(ConservationError()).__name__}: 7 of 8"
    assert WorkerEnd.of_failure(said) is WorkerEnd.CONSERVATION
    assert WorkerEnd.of_failure("WorkerBrokenError: forwards fail") is WorkerEnd.ENGINE_FAILED


def test_a_roll_that_goes_on_stops_and_is_undone(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(
        "kvrelay.deploy.controller.supervision.controller_metrics.time.monotonic", lambda: now[0]
    )
    metrics = ControllerMetrics("m", Membership().discovery, list)
    served = CollectorRegistry(auto_describe=True)
    served.register(metrics.registry)

    def value(name: str, **labels: str) -> float | None:
        return served.get_sample_value(f"kvrelay_{name}", {"model": "m", **labels})

    def rolls() -> list[float | None]:
        return [value("rolls_total", outcome=one) for one in ("done", "undone", "stopped")]

    def progress() -> list[float | None]:
        states = [value("roll_workers", state=one) for one in ("replaced", "left")]
        return [*states, value("roll_stopped"), value("roll_step_seconds")]

    assert (progress(), rolls()) == ([0, 0, 0, 0], [0, 0, 0])
    left = tuple(Replacement(WorkerRole.DECODE, f"decode-{n}", f"decode-{n + 3}") for n in range(3))
    roll = Roll(Revision(1), left, 3, 1, 0, {WorkerRole.DECODE: 3})
    metrics.rolling(roll)
    now[0] += 7
    assert progress() == [0, 3, 0, 7]
    metrics.rolling(replace(roll, left=left[1:]))
    now[0] += 5
    assert progress() == [1, 2, 0, 5]
    for _ in range(2):  # it is counted once
        metrics.rolling(replace(roll, left=left[1:], failed="no room"))
    now[0] += 5
    assert (progress(), rolls()) == ([1, 2, 1, 0], [0, 0, 1])
    metrics.rolling(replace(roll, left=left[:1]))
    metrics.rolled(back=True)
    assert (progress(), rolls()) == ([0, 0, 0, 0], [0, 1, 1])
    metrics.rolling(roll)
    metrics.rolled(back=False)
    assert (progress(), rolls()) == ([0, 0, 0, 0], [1, 1, 1])
