"""The histories of sessions whose turns a worker has generated, as tokens, without their KV.

A router has the history of its sessions, and when it dies they are gone there. Here they stay, so
that another router can go on with a session whose client sends no more than its history's digest.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvrelay.wire.history_digest import history_digest

Key = tuple[str, str]
"""A router's id, and what it calls a session."""
OVERHEAD_TOKENS: Final = 64
"""A history takes as much room as so many tokens more: its name, its owner and its place here."""


@dataclass(slots=True)
class _History:
    owner: str
    token_ids: array[int]
    number: int
    """Those that came later have higher ones."""
    digest: str = ""
    """Made when it is first looked for."""

    @property
    def room_tokens(self) -> int:
        return len(self.token_ids) + OVERHEAD_TOKENS

    def is_named(self, digest: str) -> bool:
        """Whether this digest is its own. It is hashed once, and only if the length is right."""
        if not self.digest and digest.startswith(f"{len(self.token_ids)}-"):
            self.digest = history_digest(self.token_ids)
        return bool(digest) and self.digest == digest


class HistoryStore:
    """Keeps the history of each session's last good turn, those that came last.

    Time ends none: a session that its router closes, or lets expire, is forgotten here, too, and
    the oldest ones make room for later ones. First those of owners whose histories take more than
    an equal part of the room, so that nobody displaces all others' by many turns.

    Args:
        most_tokens: of all histories together, 4 bytes each, `OVERHEAD_TOKENS` for each included.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._histories: dict[Key, _History] = {}
        self._by_owner: defaultdict[str, OrderedDict[Key, _History]] = defaultdict(OrderedDict)
        self._room_by_owner: Counter[str] = Counter()
        self._numbers = count()
        self.room_tokens = 0
        """That all histories take."""

    def __len__(self) -> int:
        return len(self._histories)

    def put(self, key: Key, owner: str, token_ids: array[int]) -> None:
        """A session's history is this one now; others make room for it, or it is not kept."""
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
        """The history of this owner that a digest names, and whose session it was; None: none."""
        for key, history in self._by_owner.get(owner, {}).items():
            if history.is_named(digest):
                return key, history.token_ids
        return None

    def _first_to_go(self) -> Key:
        """The oldest history of the owners that take more than an equal part, or of all."""
        share = self.room_tokens / len(self._by_owner)

        def order(owner: str) -> tuple[bool, int]:
            oldest = next(iter(self._by_owner[owner].values()))
            return self._room_by_owner[owner] <= share, oldest.number

        return next(iter(self._by_owner[min(self._by_owner, key=order)]))
