"""The state of a router, its requests and its workers, for gRPC and for the live page."""

from __future__ import annotations

import time
from importlib.metadata import version

from kvrelay.router.callers import Caller, Right
from kvrelay.router.metrics import OUTPUT_TOKENS, PROMPT_TOKENS, RESUBMISSIONS, RouterMetrics
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.sessions import Sessions
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.messages import WORKER_STATUS


class ServerInfo:
    """The source of the messages that describe a router and its cluster."""

    def __init__(
        self, fleet: Fleet, live: LiveRequests, metrics: RouterMetrics, sessions: Sessions
    ) -> None:
        self._fleet = fleet
        self._live = live
        self._metrics = metrics
        self._sessions = sessions
        self._started = time.monotonic()

    def message(self, caller: Caller) -> pb.GetServerInfoResponse:
        """The router's version and state, and its workers, as the caller may see them."""
        return pb.GetServerInfoResponse(
            version=version("kvrelay"),
            uptime_seconds=time.monotonic() - self._started,
            live_requests=len(self._live),
            workers=self.workers(caller),
            model_digest=self._fleet.model.name,
            requests=self._requests() if caller.may(Right.ADMIN) else None,
        )

    def workers(self, caller: Caller) -> list[pb.WorkerStatus]:
        """All workers, as the caller may see them."""
        links = sorted(self._fleet.links, key=lambda link: link.endpoint.name)
        statuses = [link.status for link in links]
        if not caller.may(Right.ADMIN):
            statuses = [status.for_tenants() for status in statuses]
        return [WORKER_STATUS.to_message(status) for status in statuses]

    def sessions(self, caller: Caller) -> list[pb.SessionState]:
        """The caller's sessions, the oldest first."""
        names = {link.endpoint.incarnation: link.endpoint.name for link in self._fleet.links}
        return [
            pb.SessionState(
                session_id=one.session_id,
                tokens=len(one.tokens),
                turns=one.num_turns,
                running=one.busy,
                waiting_turns=len(one.waiting),
                idle_seconds=self._sessions.idle_seconds(one),
                idle_timeout_seconds=one.idle_timeout_seconds,
                worker=names.get(one.worker, ""),
                kept_tokens=one.kept_tokens if one.worker in names else 0,
                history_digest=one.history_digest,
            )
            for one in self._sessions.of(caller)
        ]

    def _requests(self) -> pb.RequestCounts:
        """The counts of all callers' requests; the sums can reveal a single prompt's length."""
        return pb.RequestCounts(
            waiting=self._live.count(streaming=False),
            streaming=self._live.count(streaming=True),
            waiting_for_workers=self._live.waiting_for_workers,
            ended=self._metrics.by_outcome(),
            resubmitted=self._metrics.total(RESUBMISSIONS),
            prompt_tokens=self._metrics.total(PROMPT_TOKENS),
            output_tokens=self._metrics.total(OUTPUT_TOKENS),
        )
