"""The attempts at one call: which router is next, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from kvrelay.client.balancer import Balancer
from kvrelay.client.errors import CallFailed


class Attempts:
    """The decision after each failure whether to go on, where and when.

    Args:
        balancer: the client's.
        retry_seconds: the last failure is raised after this time without anything new; 0: at once.
        timeout_seconds: for all attempts together; None: there is no bound.
        clock: the time in seconds.
    """

    def __init__(
        self,
        balancer: Balancer,
        retry_seconds: float,
        timeout_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._balancer = balancer
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._deadline = None if timeout_seconds is None else clock() + timeout_seconds
        self._failure: CallFailed | None = None
        self._failing_since: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline of all attempts; None: there is no deadline."""
        return None if self._deadline is None else max(self._deadline - self._clock(), 0.0)

    def next(self) -> tuple[str, float]:
        """The router to call next, and the seconds to wait before.

        The first attempt is made at once if it would come too late after the wait.

        Raises:
            CallFailed: the last attempt has failed, and no other one would be in time; or the
                client is closed.
        """
        server, wait = self._balancer.choose()
        if self._balancer.is_closed:
            raise cancelled(server)
        if self._retry_seconds == 0:
            return server, 0.0
        if not self._is_late(wait):
            return server, wait
        if self._failing_since is not None and self._failure is not None:
            raise self._failure
        return server, 0.0

    def _is_late(self, wait_seconds: float) -> bool:
        """Whether an attempt after a wait would be past a bound."""
        now = self._clock()
        if self._deadline is not None and now + wait_seconds >= self._deadline:
            return True
        since = now if self._failing_since is None else self._failing_since
        return now + wait_seconds > since + self._retry_seconds

    def heard(self, server: str, *, is_new: bool) -> None:
        """Note that a router has sent something; it is new unless a former attempt has had it."""
        self._balancer.answered(server)
        if is_new:
            self._failing_since = None

    def failed(self, failure: CallFailed) -> None:
        """Note that an attempt has failed.

        Raises:
            CallFailed: it is no use to try again.
        """
        if not failure.may_pass:
            raise failure
        self._balancer.failed(failure.server, failure.retry_seconds)
        if self._retry_seconds == 0:
            raise failure
        self._failure = failure
        if self._failing_since is None:
            self._failing_since = self._clock()


def without_completion(server: str) -> CallFailed:
    """The failure of a call whose stream ended without a completion."""
    return CallFailed(server, grpc.StatusCode.UNAVAILABLE, "the stream ended without a completion")


def cancelled(server: str) -> CallFailed:
    """The failure of a call that its own client has ended."""
    return CallFailed(server, grpc.StatusCode.CANCELLED, "cancelled by its client")
