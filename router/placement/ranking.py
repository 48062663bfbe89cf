"""The ready workers of one role, kept in order while their loads change."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvrelay.wire.load import WorkerLoad

ItemT = TypeVar("ItemT")

Score: TypeAlias = tuple[float, ...]
"""A worker's score: less is better; compared from the left."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker and its load."""

    worker: str
    incarnation: str
    pool_tokens: int
    """Tokens that one request can hold there: a longer one never fits."""
    load: WorkerLoad
    backlog_tokens: int
    """Prompt tokens that it has yet to compute or pull, with those sent to it since `load`."""
    pending_tokens: int
    """The backlog, and the tokens that have left it since `load`.

    The latter take room that `load` does not count.
    """
    num_requests: int = 0
    """Requests that it has, running or waiting."""
    locality: str = ""
    """The locality; workers of one locality are near each other. Empty: not known."""

    @property
    def headroom_tokens(self) -> int:
        """Tokens that its pool has free after the pending ones; below zero when overcommitted."""
        return self.load.room_tokens - self.pending_tokens


class Ranking:
    """Candidates by their scores, and by name where scores are equal.

    An insertion takes a binary search; the best is always first.
    """

    def __init__(self) -> None:
        self._order: list[tuple[Score, str, str]] = []  # score, worker, incarnation; sorted
        self._candidates: dict[str, tuple[tuple[Score, str, str], Candidate]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._candidates

    def get(self, incarnation: str) -> Candidate | None:
        """The candidate of an incarnation; None: it is not ranked."""
        entry = self._candidates.get(incarnation)
        return None if entry is None else entry[1]

    def put(self, candidate: Candidate, score: Score) -> None:
        """Add a candidate; it replaces its incarnation's earlier one."""
        place = (score, candidate.worker, candidate.incarnation)
        before = self._candidates.get(candidate.incarnation)
        self._candidates[candidate.incarnation] = (place, candidate)
        if before is None:
            bisect.insort(self._order, place)
        elif before[0] != place:
            self._remove(before[0])
            bisect.insort(self._order, place)

    def drop(self, incarnation: str) -> None:
        """Remove a candidate, which must be there."""
        self._remove(self._candidates.pop(incarnation)[0])

    def holding(self, tokens: int, suspects: Set[str] = frozenset()) -> Iterator[Candidate]:
        """Iterate over the candidates that can hold a request of `tokens`, the best first.

        Args:
            tokens: the request's tokens.
            suspects: incarnations that come after all others. The ranking must not change before
                the iteration ends.
        """
        last = []
        for _, _, incarnation in self._order:
            candidate = self._candidates[incarnation][1]
            if candidate.pool_tokens >= tokens:
                if incarnation in suspects:
                    last.append(candidate)
                else:
                    yield candidate
        yield from last

    def _remove(self, place: tuple[Score, str, str]) -> None:
        del self._order[bisect.bisect_left(self._order, place)]


class Repeatable(Generic[ItemT]):
    """An iterable over an iterator that may be repeated; it takes each item once."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = iter(items)
        self._taken: list[ItemT] = []

    def __iter__(self) -> Iterator[ItemT]:
        yield from self._taken
        for item in self._items:
            self._taken.append(item)
            yield item
