"""A worker's lease, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kvrelay.engine.worker.worker_lease import Renewal, StaleEpochError, WorkerLease, lease_clock

SECONDS = 60.0


class Ticking:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def lease(clock: Ticking, ended: list[str]) -> WorkerLease:
    lease = WorkerLease(clock)
    lease.begin(SECONDS, lambda: ended.append("ended"))
    return lease


def test_a_worker_that_nobody_supervises_serves_for_ever(clock: Ticking):
    lease = WorkerLease(clock)
    clock.now += 1e9
    lease.check()
    assert not lease.has_run_out


def test_a_lease_that_is_not_renewed_ends_the_process(lease, clock, ended):
    clock.now += SECONDS - 0.1
    lease.check()
    assert not ended
    clock.now += 0.1
    lease.check()
    assert ended == ["ended"]


def test_a_renewal_counts_from_the_stamp_and_not_from_its_arrival(lease, clock):
    stamp = lease.stamp()
    clock.now += 50
    lease.renew(Renewal(1, SECONDS, stamp))
    clock.now += 10
    assert lease.has_run_out


def test_a_late_renewal_shortens_nothing(lease, clock):
    early = lease.stamp()
    clock.now += 30
    lease.renew(Renewal(1, SECONDS, lease.stamp()))
    lease.renew(Renewal(1, SECONDS, early))
    clock.now += 59
    assert not lease.has_run_out


def test_a_lease_that_has_run_out_stays_so(lease, clock):
    """A frozen process that wakes hears a renewal before it notices the time."""
    clock.now += SECONDS
    stamp = lease.stamp()
    lease.renew(Renewal(1, SECONDS, stamp))
    assert lease.has_run_out


def test_a_renewal_without_a_stamp_renews_nothing_but_says_the_epoch(lease, clock):
    clock.now += 30
    lease.renew(Renewal(2, SECONDS, None))
    with pytest.raises(StaleEpochError):
        lease.renew(Renewal(1, SECONDS, lease.stamp()))
    clock.now += 30
    assert lease.has_run_out


def test_an_earlier_controller_renews_nothing(lease, clock):
    lease.renew(Renewal(2, SECONDS, lease.stamp()))
    clock.now += 30
    with pytest.raises(StaleEpochError, match=r"^epoch 1 is over: 2 has begun$"):
        lease.renew(Renewal(1, SECONDS, lease.stamp()))
    clock.now += 30
    assert lease.has_run_out


def test_the_watch_ends_the_process(ended):
    lease = WorkerLease()
    lease.begin(0.05, lambda: ended.append("ended"))
    lease.watch()
    assert ended == ["ended"]


@pytest.mark.parametrize("alone", [False, True])
def test_sleep_counts_only_for_a_machine_that_sleeps_alone(
    alone: bool, monkeypatch: pytest.MonkeyPatch
):
    """While a machine is suspended, its boot time goes on and its monotonic time does not."""
    slept = 0.0
    monkeypatch.setattr("time.clock_gettime", lambda clock: 1000.0 + slept)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    lease = WorkerLease(lease_clock(suspended_alone=alone))
    lease.begin(SECONDS, lambda: None)
    slept = 2 * SECONDS
    assert lease.has_run_out is alone
