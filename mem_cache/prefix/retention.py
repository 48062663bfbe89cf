"""The pages of the prefix index that are evicted after all others, because requests have asked so.

A request may ask that its pages are found for some time. That pins nothing: they stay evictable,
and go before any request has to wait. It changes an order alone, and within a bound: all tenants
that retain something have equal parts of it. What exceeds a tenant's part is evicted as all else.

Of a prompt with a window only those pages of the window are retained that its next token sees. They
have a bound of their own, because a window's pool is smaller.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from kvrelay.mem_cache.errors import ConservationError
from kvrelay.mem_cache.prefix.radix_node import RadixNode

_LEAST_ENTRIES = 64
"""So many entries are kept before those that are out of date are dropped."""


@dataclass(slots=True)
class _Retained:
    """The nodes that one tenant retains."""

    tokens: int = 0
    window_tokens: int = 0
    """The tokens of the nodes whose window pages are retained, too."""
    nodes: int = 0
    ends: list[tuple[float, int, int, RadixNode]] = field(default_factory=list)
    """A heap of them by their ends, the deepest first. Some entries are out of date."""

    def pop(self) -> RadixNode:
        """Take the node that ends first off the heap; there must be one."""
        while True:
            until, _, _, node = heapq.heappop(self.ends)
            if _is_of(node, until):
                return node

    def next_end(self) -> float:
        """The moment at which the first of the nodes ends; infinite if there is none."""
        while self.ends:
            until, _, _, node = self.ends[0]
            if _is_of(node, until):
                return until
            heapq.heappop(self.ends)
        return float("inf")

    def push(self, node: RadixNode, number: int) -> None:
        """Add a retained node, or one whose end has changed."""
        if len(self.ends) > 2 * self.nodes + _LEAST_ENTRIES:
            self.ends = [entry for entry in self.ends if _is_of(entry[3], entry[0])]
            heapq.heapify(self.ends)
        heapq.heappush(self.ends, (node.retained_until, -node.depth, number, node))


class Retention:
    """The retained nodes of one prefix index, by tenant.

    Args:
        most_tokens: the most tokens that all tenants retain; 0: nothing is retained.
        clock: seconds, monotonic.
        window: the tokens that the layers with the largest window look back; 0: none has one.
        most_window_tokens: the most tokens whose window pages all tenants retain.
    """

    def __init__(
        self,
        most_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        window: int = 0,
        most_window_tokens: int = 0,
    ) -> None:
        self._most_tokens = most_tokens
        self._clock = clock
        # The next token is in its own window, and the last page is retained in any case.
        self._seen_tokens = max(window - 1, 1) if window else 0
        self._most_window_tokens = most_window_tokens
        self._tenants: dict[str, _Retained] = {}
        self._numbers = count()

    @classmethod
    def of_share(cls, share: float, tokens: Sequence[int], windows: Sequence[int | None]) -> Self:
        """Make one that retains a part of every pool at most.

        Args:
            share: the part.
            tokens: for each pool the tokens that its pages hold.
            windows: for each pool the tokens that its layers look back; None: all.
        """
        in_windows = [held for held, window in zip(tokens, windows, strict=True) if window]
        return cls(
            int(share * max(tokens)),
            window=max(window or 0 for window in windows),
            most_window_tokens=int(share * min(in_windows, default=0)),
        )

    @property
    def tokens(self) -> int:
        """The tokens of all retained nodes, those included whose time has just ended."""
        return sum(retained.tokens for retained in self._tenants.values())

    def retain(self, lowest: RadixNode, tenant: str, seconds: float) -> None:
        """Retain a node and those above it for so many seconds from now, or longer if they are.

        Window pages that the next token does not see are retained no more, unless the node is for
        longer.
        """
        if not self._most_tokens:
            return
        until = self._clock() + seconds
        for node in lowest.path():
            is_seen = lowest.end - node.end < self._seen_tokens
            if node.retained_until >= until:
                self._retain_window(node, wanted=is_seen or node.retains_window)
                continue
            if not node.retained_until:
                node.retained_by = tenant
                self._count(node, 1)
            node.retained_until = until
            self._retain_window(node, wanted=is_seen)
            self._tenants[node.retained_by].push(node, next(self._numbers))

    def split(self, upper: RadixNode) -> None:
        """Note that the upper half of a node is a node now."""
        if upper.retained_until:
            retained = self._tenants[upper.retained_by]
            retained.nodes += 1
            retained.push(upper, next(self._numbers))

    def join(self, num_nodes: int, joined: RadixNode) -> None:
        """Note that so many nodes have become a part of another one, retained as they were."""
        if joined.retained_until:
            self._tenants[joined.retained_by].nodes -= num_nodes

    def drop(self, node: RadixNode) -> None:
        """End a node's retention, if there is any."""
        if node.retained_until:
            self._retain_window(node, wanted=False)
            node.retained_until = 0.0
            self._count(node, -1)

    def end_due(self) -> Iterator[RadixNode]:
        """End what is not to be retained any more: by its time, or above its tenant's part.

        Yields:
            The nodes, which are evicted like all others from now on.
        """
        now = self._clock()
        for retained in list(self._tenants.values()):
            while retained.next_end() <= now:
                yield self._end_first(retained)
        # Those whose time has ended have no part any more.
        for retained in list(self._tenants.values()):
            while self._exceeds_part(retained):
                yield self._end_first(retained)

    def give_up(self) -> RadixNode:
        """End the retention that ends first, of the tenant that retains most: nothing else is left.

        Something must be retained.
        """
        return self._end_first(max(self._tenants.values(), key=lambda retained: retained.tokens))

    def audit(self, nodes: Iterator[RadixNode]) -> None:
        """Raise `ConservationError` if the nodes of the index retain other tokens than counted."""
        found: dict[str, tuple[int, int, int]] = {}
        for node in nodes:
            if node.retained_until:
                tokens, in_window, number = found.get(node.retained_by, (0, 0, 0))
                in_window += len(node.tokens) if node.retains_window else 0
                found[node.retained_by] = tokens + len(node.tokens), in_window, number + 1
        counted = {
            name: (one.tokens, one.window_tokens, one.nodes) for name, one in self._tenants.items()
        }
        if found != counted:
            raise ConservationError(f"retained {counted}, in truth {found}")

    def _exceeds_part(self, retained: _Retained) -> bool:
        number = len(self._tenants)
        return (
            retained.tokens * number > self._most_tokens
            or retained.window_tokens * number > self._most_window_tokens
        )

    def _retain_window(self, node: RadixNode, *, wanted: bool) -> None:
        if node.retains_window is not wanted:
            node.retains_window = wanted
            tokens = len(node.tokens) if wanted else -len(node.tokens)
            self._tenants[node.retained_by].window_tokens += tokens

    def _end_first(self, retained: _Retained) -> RadixNode:
        node = retained.pop()
        self.drop(node)
        return node

    def _count(self, node: RadixNode, sign: int) -> None:
        retained = self._tenants.setdefault(node.retained_by, _Retained())
        retained.tokens += sign * len(node.tokens)
        retained.nodes += sign
        if not retained.nodes:
            del self._tenants[node.retained_by]


def _is_of(node: RadixNode, until: float) -> bool:
    """Whether an entry of a heap says how long its node is retained."""
    return node.parent is not None and node.retained_until == until
