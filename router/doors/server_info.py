"""The state of a router, its requests and its workers, for gRPC and for the live page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

from kvrelay.router.callers import Caller, Right
from kvrelay.router.metrics import OUTPUT_TOKENS, PROMPT_TOKENS, RESUBMISSIONS, RouterMetrics
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.requests.live_requests import LiveRequests
from kvrelay.router.sessions import Session, Sessions
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.messages import WORKER_STATUS

_PIECE: Final = 64
"""The most sessions described in a row: a millisecond of the event loop."""


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

    async def sessions(self, caller: Caller) -> list[pb.SessionState]:
        """The caller's sessions, the oldest first; others are served between two pieces."""
        names = {link.endpoint.incarnation: link.endpoint.name for link in self._fleet.links}
        told: list[pb.SessionState] = []
        for number, one in enumerate(self._sessions.of(caller)):
            if number % _PIECE == _PIECE - 1:
                await asyncio.sleep(0)
            told.append(self._session_state(one, names))
        return told

    def _session_state(self, session: Session, names: Mapping[str, str]) -> pb.SessionState:
        return pb.SessionState(
            session_id=session.session_id,
            tokens=len(session.tokens),
            turns=session.num_turns,
            running=session.busy,
            waiting_turns=len(session.waiting),
            idle_seconds=self._sessions.idle_seconds(session),
            idle_timeout_seconds=session.idle_timeout_seconds,
            worker=names.get(session.worker, ""),
            kept_tokens=session.kept_tokens if session.worker in names else 0,
            history_digest=session.history_digest,
        )

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
