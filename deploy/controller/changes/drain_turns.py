"""The turns in which workers drain for a reason that can wait: few of a role at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from kvrelay.deploy.controller.membership import Membership
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

_PART_OF_ROLE: Final = 10
"""The divisor of a role's size: a tenth of its workers, or one, may be missing at a time."""


class DrainTurns:
    """Workers' turns to drain: what hits all of them must not end them all at once.

    A worker is missing from when it begins to drain, or is lost, until its successor is live.

    Args:
        members: knows which workers are missing; a turn waits for its changes.
        roles: returns the roles of the workers that are to stay, by name.
    """

    def __init__(self, members: Membership, roles: Callable[[], Mapping[str, WorkerRole]]) -> None:
        self._members = members
        self._roles = roles
        self._in_turn: set[str] = set()
        """Workers that may begin to drain now, and have not yet reported that they do."""

    @asynccontextmanager
    async def turn(self, info: WorkerInfo) -> AsyncIterator[None]:
        """Wait until a worker may drain; the turn lasts as long as the context.

        If it ends without an error, either the worker drains, or another one has its turn.
        """
        while not self._may_drain(info):
            await self._members.changed()
        self._in_turn.add(info.name)
        try:
            yield
        finally:
            self._in_turn.discard(info.name)
            self._members.notify()

    def _may_drain(self, info: WorkerInfo) -> bool:
        roles = self._roles()
        role = [name for name in roles if roles[name] is info.role]
        missing = [name for name in role if name != info.name and self._is_missing(name)]
        return len(missing) < max(1, len(role) // _PART_OF_ROLE)

    def _is_missing(self, name: str) -> bool:
        members = self._members
        return name not in members.live or members.is_draining(name) or name in self._in_turn
