"""Which router is called when, and when it is enough; on a clock of the test's own."""

from __future__ import annotations

import grpc
import pytest

from kvrelay.client.attempts import Attempts
from kvrelay.client.balancer import FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS, Balancer
from kvrelay.client.errors import CallFailed

GONE = grpc.StatusCode.UNAVAILABLE


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_calls_go_to_the_router_with_the_fewest(clock: Clock) -> None:
    balancer = Balancer(["a", "b", "c"], clock)
    calls = []
    for _ in range(9):
        server, wait = balancer.choose()
        assert wait == 0
        balancer.begin(server)
        calls.append(server)
    assert [calls.count(server) for server in "abc"] == [3, 3, 3]
    balancer.end("b")
    assert balancer.choose() == ("b", 0)


def test_a_router_that_fails_is_left_alone_longer_each_time(clock: Clock) -> None:
    balancer = Balancer(["a"], clock)
    waits = []
    for _ in range(12):
        balancer.failed("a", None)
        waits.append(balancer.choose()[1])
        clock.now += waits[-1]
        assert balancer.choose() == ("a", 0)
    assert FIRST_PAUSE_SECONDS / 2 <= waits[0] <= FIRST_PAUSE_SECONDS
    assert waits[-1] > MOST_PAUSE_SECONDS / 2 - 0.01
    assert max(waits) < MOST_PAUSE_SECONDS + 0.01
    balancer.answered("a")
    balancer.failed("a", None)
    assert balancer.choose()[1] <= FIRST_PAUSE_SECONDS + 0.01


def test_an_outage_counts_once_however_many_calls_it_ends(clock: Clock) -> None:
    balancer = Balancer(["a"], clock)
    for outage in range(3):
        for _ in range(8):
            balancer.failed("a", None)
        wait = balancer.choose()[1]
        assert wait <= FIRST_PAUSE_SECONDS * 2**outage
        clock.now += wait
    balancer.failed("a", None)
    balancer.failed("a", 2.0)
    assert balancer.choose() == ("a", 2.0), "a hint is kept to all the same"


def test_a_closed_client_makes_no_attempt(clock: Clock) -> None:
    balancer = Balancer(["a"], clock)
    balancer.is_closed = True
    with pytest.raises(CallFailed, match="CANCELLED"):
        Attempts(balancer, 0.0, None, clock).next()


def test_a_hint_is_kept_to_and_others_are_called_meanwhile(clock: Clock) -> None:
    balancer = Balancer(["a", "b"], clock)
    balancer.failed("a", 2.0)
    assert [balancer.choose() for _ in range(9)] == [("b", 0.0)] * 9
    balancer.failed("b", 3.0)
    assert balancer.choose() == ("a", 2.0)


def test_a_failure_is_raised_when_its_time_is_over(clock: Clock) -> None:
    attempts = Attempts(Balancer(["a"], clock), 10.0, None, clock)
    failure, begun = CallFailed("a", GONE, "gone"), clock.now

    def fail_for_ever() -> None:
        while True:
            clock.now += attempts.next()[1]
            attempts.failed(failure)

    with pytest.raises(CallFailed) as caught:
        fail_for_ever()
    assert caught.value is failure
    assert 10 - MOST_PAUSE_SECONDS < clock.now - begun <= 10


def test_time_counts_from_the_first_failure_after_something_new(clock: Clock) -> None:
    attempts = Attempts(Balancer(["a"], clock), 10.0, None, clock)
    attempts.next()
    for _ in range(5):
        clock.now += 1000  # a long prompt
        attempts.failed(CallFailed("a", GONE, "gone"))
        clock.now += attempts.next()[1]
        attempts.heard("a", is_new=True)
    attempts.failed(CallFailed("a", GONE, "gone"))
    clock.now += 11
    attempts.heard("a", is_new=False)
    with pytest.raises(CallFailed, match="a: UNAVAILABLE: gone"):
        attempts.next()


def test_a_deadline_is_for_all_attempts(clock: Clock) -> None:
    attempts = Attempts(Balancer(["a"], clock), 10.0, 3.0, clock)
    assert attempts.seconds_left == 3.0
    attempts.next()
    clock.now += 2
    assert attempts.seconds_left == 1.0
    attempts.failed(CallFailed("a", GONE, "gone", retry_seconds=1.0))
    with pytest.raises(CallFailed, match="gone"):
        attempts.next()


@pytest.mark.parametrize(("retry", "timeout"), [(30.0, 1.0), (5.0, None)])
def test_a_first_attempt_does_not_wait_past_its_bounds(
    clock: Clock, retry: float, timeout: float | None
) -> None:
    balancer = Balancer(["a"], clock)
    balancer.failed("a", 6.0)  # another call's failure
    attempts = Attempts(balancer, retry, timeout, clock)
    assert attempts.next() == ("a", 0.0)
    attempts.failed(CallFailed("a", GONE, "gone"))
    with pytest.raises(CallFailed, match="gone"):
        attempts.next()
    assert Attempts(balancer, 30.0, 7.0, clock).next() == ("a", 6.0)


@pytest.mark.parametrize(
    ("status", "hint", "may_pass"),
    [
        (GONE, None, True),
        (GONE, 0.5, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 0.5, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, False),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, False),
        (grpc.StatusCode.INTERNAL, None, False),
        (grpc.StatusCode.ALREADY_EXISTS, None, False),
    ],
)
def test_only_what_may_pass_is_tried_again(
    clock: Clock, status: grpc.StatusCode, hint: float | None, may_pass: bool
) -> None:
    attempts = Attempts(Balancer(["a"], clock), 10.0, None, clock)
    failure = CallFailed("a", status, "so", hint)
    if may_pass:
        attempts.failed(failure)
        assert attempts.next()[1] > 0
    else:
        with pytest.raises(CallFailed) as caught:
            attempts.failed(failure)
        assert caught.value is failure


def test_nothing_is_tried_again_without_time_for_it(clock: Clock) -> None:
    balancer = Balancer(["a"], clock)
    with pytest.raises(CallFailed):
        Attempts(balancer, 0.0, None, clock).failed(CallFailed("a", GONE, "gone"))
    assert Attempts(balancer, 0.0, None, clock).next() == ("a", 0.0), "nor is it waited"


@pytest.mark.parametrize("servers", [[], ["a", "a"]])
def test_servers_are_given_once_each(servers: list[str]) -> None:
    with pytest.raises(ValueError, match="servers"):
        Balancer(servers)
