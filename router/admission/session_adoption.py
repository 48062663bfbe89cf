"""The opening of sessions, those of a lost router included."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Sequence
from typing import Final

import grpc

from kvrelay.router.callers import Caller
from kvrelay.router.errors import InvalidField, Unavailable, UnknownHistory
from kvrelay.router.metrics import ADOPTIONS, RouterMetrics
from kvrelay.router.placement.fleet import Fleet
from kvrelay.router.sessions import Session, Sessions
from kvrelay.router.turns import FairTurns
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.history_digest import digest_tokens, is_history
from kvrelay.wire.worker_info import WorkerRole

_SECONDS: Final = 5.0
"""The longest wait for a worker's answer: its engine answers between two passes of its loop."""
_AT_ONCE: Final = 4
"""The most histories that workers are asked for at a time: others wait, callers in turn."""
_RETRY_MS: Final = 1000
_MOST_WAITING: Final = 256
"""The most that wait; the caller with the most makes room for others."""


class SessionAdoption:
    """The opening of sessions with a history that a client brings or names by its digest.

    A named history is looked for among this router's own sessions, then on the workers that
    generate. Each worker keeps the histories of the turns that it has generated, even if the router
    of the session is gone. Only histories of the caller's own name are found.

    Args:
        sessions: this router's.
        fleet: the workers.
        metrics: the router's.
    """

    def __init__(self, sessions: Sessions, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._sessions = sessions
        self._fleet = fleet
        self._metrics = metrics
        self._turns = FairTurns(_AT_ONCE, _AT_ONCE + _MOST_WAITING)

    async def open(self, caller: Caller, message: pb.OpenSessionRequest) -> Session:
        """Open a session, as `Sessions.open` does.

        Raises:
            UnknownHistory: nobody has the named history.
            Unavailable: a worker that may have it did not answer.
        """
        limits = self._fleet.limits()
        limits.check_prompt("history", len(message.history.ids))
        if message.history_digest:
            tokens = _tokens_of(message)
            limits.check_prompt("history_digest", tokens)
            # A call that is refused in any case must not load the workers.
            self._sessions.check_open(caller, message, limits.vocab_size, tokens)
            message.history.ids.extend(await self._find(caller, message.history_digest))
        return self._sessions.open(caller, message, limits.vocab_size)

    async def _find(self, caller: Caller, digest: str) -> Sequence[int]:
        try:
            history = self._sessions.find_history(caller, digest)
            if history is None:
                async with self._turns.turn(caller.turn, 1, _too_many):
                    history = await self._ask_workers(caller, digest)
        except UnknownHistory:
            self._metrics.count(ADOPTIONS, outcome="unknown")
            raise
        except Unavailable:
            self._metrics.count(ADOPTIONS, outcome="unavailable")
            raise
        self._metrics.count(ADOPTIONS, outcome="found")
        return history

    async def _ask_workers(self, caller: Caller, digest: str) -> array[int]:
        """Ask all generating workers at once; return the first history that one of them has."""
        links = [one for one in self._fleet.links if one.endpoint.role is not WorkerRole.PREFILL]
        asked = [
            asyncio.create_task(one.find_history(caller.name, digest, _SECONDS))
            for one in links
            if one.ready
        ]
        silent = len(links) - len(asked)
        try:
            for answer in asyncio.as_completed(asked):
                history = await _or_none(answer)
                if history is None:
                    silent += 1
                elif is_history(history, digest):
                    return history
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if silent:
            raise Unavailable(f"{silent} workers that may have the history do not answer")
        raise UnknownHistory(digest)


def _too_many() -> Unavailable:
    return Unavailable(f"{_MOST_WAITING} histories are looked for already", _RETRY_MS)


def _tokens_of(message: pb.OpenSessionRequest) -> int:
    """The length of the history that a message names; raises `InvalidField` for a bad digest."""
    if message.history.ids:
        raise InvalidField("history_digest", "is not allowed with history")
    try:
        return digest_tokens(message.history_digest)
    except ValueError as error:
        raise InvalidField("history_digest", str(error)) from None


async def _or_none(answer: Awaitable[array[int]]) -> array[int] | None:
    """Await a worker's answer; None: the call failed."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        return await answer
    return None
