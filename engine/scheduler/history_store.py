"""The histories of sessions whose turns a worker has generated, as tokens, without their KV.

A router keeps the histories of its sessions, and they are lost when it dies. The copies here let
another router go on with such a session. Its client then sends no more than the history's digest.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvrelay.wire.history_digest import history_digest

Key = tuple[str, str]
"""A router's id, and its name for a session."""
OVERHEAD_TOKENS: Final = 64
"""Tokens counted for each history beside its own, for its name, its owner and its entry here."""


@dataclass(slots=True)
class _History:
    owner: str
    token_ids: array[int]
    number: int
    """The order in which histories came; later ones have higher numbers."""
    digest: str = ""
    """The digest, computed when it is first looked for."""

    @property
    def room_tokens(self) -> int:
        return len(self.token_ids) + OVERHEAD_TOKENS

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
        self._by_owner: defaultdict[str, OrderedDict[Key, _History]] = defaultdict(OrderedDict)
        self._room_by_owner: Counter[str] = Counter()
        self._numbers = count()
        self.room_tokens = 0
        """Tokens that all histories take."""

    def __len__(self) -> int:
        return len(self._histories)

    def put(self, key: Key, owner: str, token_ids: array[int]) -> None:
        """Store a session's new history. Others make room for it, or it is not kept."""
        self.forget(key)
        history = _History(owner, token_ids, next(self._numbers))
        self._histories[key] = self._by_owner[owner][key] = history
        self.room_tokens += history.room_tokens
        self._room_by_owner[owner] += history.room_tokens
        while self.room_tokens > self._most_tokens:
            self.forget(self._first_to_go())

    def forget(self, key: Key) -> None:
        """Drop a session's history, if it is here."""
        history = self._histories.pop(key, None)
        if history is None:
            return
        self.room_tokens -= history.room_tokens
        self._room_by_owner[history.owner] -= history.room_tokens
        del self._by_owner[history.owner][key]
        if not self._by_owner[history.owner]:
            del self._by_owner[history.owner], self._room_by_owner[history.owner]

    def find(self, owner: str, digest: str) -> tuple[Key, array[int]] | None:
        """Find the owner's history that has this digest, and its session; None: there is none."""
        for key, history in self._by_owner.get(owner, {}).items():
            if history.is_named(digest):
                return key, history.token_ids
        return None

    def _first_to_go(self) -> Key:
        """Find the oldest history of owners with more than an equal share, or else of all."""
        share = self.room_tokens / len(self._by_owner)

        def order(owner: str) -> tuple[bool, int]:
            oldest = next(iter(self._by_owner[owner].values()))
            return self._room_by_owner[owner] <= share, oldest.number

        return next(iter(self._by_owner[min(self._by_owner, key=order)]))
