"""The histories of sessions whose turns a worker has generated, as tokens, without their KV.

A router keeps the histories of its sessions, and they are lost when it dies. The copies here let
another router go on with such a session. Its client then sends no more than the history's digest.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from kvrelay.mem_cache.fair_shares import FairShares
from kvrelay.wire.history_digest import history_digest

Key = tuple[str, str]
"""A router's id, and its name for a session."""
OVERHEAD_TOKENS: Final = 64
"""Tokens counted for each history beside its own, for its name, its owner and its entry here."""


@dataclass(slots=True)
class _History:
    token_ids: array[int]
    digest: str = ""
    """The digest, computed when it is first looked for."""

    def is_named(self, digest: str) -> bool:
        """Whether this is the history's digest, computed once, and only if the length is right."""
        if not self.digest and digest.startswith(f"{len(self.token_ids)}-"):
            self.digest = history_digest(self.token_ids)
        return bool(digest) and self.digest == digest


class HistoryStore:
    """The history of the last good turn of each session, as far as there is room.

    Histories do not expire by time. A session that its router closes, or lets expire, is forgotten
    here, too. The oldest histories make room for later ones. First to go are those of owners that
    take more than an equal share of the room, so that no owner displaces all others.

    Args:
        most_tokens: the most tokens of all histories, of 4 bytes each, with `OVERHEAD_TOKENS` for
            each history.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._histories: dict[Key, _History] = {}
        self._shares: FairShares[Key] = FairShares()

    @property
    def room_tokens(self) -> int:
        """Tokens that all histories take."""
        return self._shares.total

    def __len__(self) -> int:
        return len(self._histories)

    def put(self, key: Key, owner: str, token_ids: array[int]) -> None:
        """Store a session's new history. Others make room for it, or it is not kept."""
        self.forget(key)
        self._histories[key] = _History(token_ids)
        self._shares.add(key, owner, len(token_ids) + OVERHEAD_TOKENS)
        while self.room_tokens > self._most_tokens and (oldest := self._shares.first_to_go()):
            self.forget(oldest)

    def forget(self, key: Key) -> None:
        """Drop a session's history, if it is here."""
        self._histories.pop(key, None)
        self._shares.remove(key)

    def find(self, owner: str, digest: str) -> tuple[Key, array[int]] | None:
        """Find the owner's history that has this digest, and its session; None: there is none."""
        for key in self._shares.of(owner):
            history = self._histories[key]
            if history.is_named(digest):
                return key, history.token_ids
        return None
