"""Heartbeats on the hand-over streams: a peer that does not answer ends its request's attempt."""

from __future__ import annotations

import time

from kvrelay.decode_worker.decode_requests import DecodeRequests
from kvrelay.decode_worker.pulls import Pulls
from kvrelay.decode_worker.request import DecodeRequest, HandedOverRequest
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.periodic_check import CHECKS_IN_TIMEOUT, PeriodicCheck
from kvrelay.kv_transfer.hand_over.states import DecodeState
from kvrelay.wire.hand_over import Heartbeat
from kvrelay.wire.output import FailureReason


class Heartbeats:
    """The heartbeats to the prefill workers that requests wait for.

    Args:
        context: the worker's requests.
        requests: sends the heartbeats, and ends requests.
        pulls: knows the reads that do not end.
        timeout: seconds after which a silent prefill worker is given up.
    """

    def __init__(
        self,
        context: SchedulerContext[DecodeRequest],
        requests: DecodeRequests,
        pulls: Pulls,
        timeout: float,
    ) -> None:
        self._context = context
        self._requests = requests
        self._pulls = pulls
        self._timeout = timeout
        self.check = PeriodicCheck(timeout / CHECKS_IN_TIMEOUT)
        """The timer of the heartbeats."""

    def send_or_give_up(self) -> None:
        """Send heartbeats if they are due, and fail requests whose peer or read takes too long.

        A prefill worker answers each heartbeat, so one that has been silent for long is lost. A
        stream that is not open yet waits for a handshake, which has time-outs of its own.
        """
        now = time.monotonic()
        if not self.check.is_due(now):
            return
        for request in list(self._context.requests.values()):
            if not isinstance(request, HandedOverRequest) or not request.stream.is_open:
                continue
            if request.hand_over.state is DecodeState.VALID:
                continue
            if now - request.stream.sequencer.heard_at > self._timeout:
                error = f"{request.peer} was silent for {self._timeout:g} s"
                self._requests.fail(request, FailureReason.PEER_LOST, error)
            elif not self._pulls.fail_if_stuck(request, now):
                self._requests.send(request, Heartbeat())
