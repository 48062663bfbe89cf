"""Estimates the memory that running requests will still need, which admission leaves free."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager

_WEIGHT = 1 / 16
"""Weight of the latest request in the moving mean."""
_RETRACTION_RAISE = 1.5
"""What a retraction multiplies the estimate by: it was too low."""


class GrowthReserve:
    """Estimates output lengths as a part of `max_tokens`, measured on requests that finished.

    No request owns the reserve: it only keeps new requests out, so that those
    that run can grow without a retraction. It starts at its upper bound and
    learns; SGLang's `new_token_ratio`, which decays by itself, is the model.

    Args:
        kv_cache: manages the memory that the requests grow in.
        least: of `max_tokens`, the smallest part that is ever left for a request, in [0, 1].
        most: the largest.
        ahead: tokens that steps in flight may write beyond those that are kept.
    """

    def __init__(self, kv_cache: KVCacheManager, least: float, most: float, ahead: int = 0) -> None:
        assert 0 <= least <= most <= 1
        self._kv_cache = kv_cache
        self._least = least
        self._most = most
        self._ahead = ahead
        self._part = most
        self._mean_output = 0.0

    @property
    def mean_output_tokens(self) -> int:
        """Tokens that a request generates, on the moving average; 0 before one has ended."""
        return round(self._mean_output)

    def learn_from_finish(self, request: Request) -> None:
        """Move the estimate towards the output length of a request that ended by itself."""
        tokens = len(request.output_ids)
        self._mean_output += (_WEIGHT if self._mean_output else 1) * (tokens - self._mean_output)
        part = tokens / request.params.stops.max_tokens
        self._set(self._part + _WEIGHT * (part - self._part))

    def learn_from_retraction(self) -> None:
        """Raise the estimate: memory ran short, so it was too low."""
        self._set(max(self._part, _WEIGHT) * _RETRACTION_RAISE)

    def _set(self, part: float) -> None:
        self._part = min(max(part, self._least), self._most)

    def tokens(self, request: Request) -> int:
        """Tokens that the request is expected to generate from now on, at least its next one."""
        return self.total_tokens((request,))

    def total_tokens(self, requests: Iterable[Request]) -> int:
        """The sum of `tokens` over the requests."""
        total, part = 0, self._part
        for request in requests:
            most, has = request.params.stops.max_tokens, len(request.output_ids)
            expected, left = ceil(part * most) - has, most - has
            # Not by `min` and `max`, calls of which take longer than all else here.
            if expected < 1:
                expected = 1
            if expected > left:
                expected = left
            total += expected
        return total

    def headroom(self, request: Request, others: Iterable[Request]) -> list[int] | None:
        """Pages of each pool that must stay free when a request is admitted beside `others`.

        None for one that is alone: it would wait for ever if its choices did not fit
        together. Then some of them are retracted, and go on when there is room.
        """
        growing = [*others, request]
        return self.pages(growing) if len(growing) > 1 else None

    def pages(self, requests: Iterable[Request]) -> list[int]:
        """Pages of each pool that the requests are expected to need beyond what they have.

        A request without memory is taken to have its input's pages.
        """
        shape = self._kv_cache.shape
        total = [0] * len(shape.pools)
        for request in requests:
            goal = request.num_tokens + self.tokens(request) - 1 + self._ahead
            goal = min(goal, request.most_tokens)
            lease = request.lease
            has = (
                request.input_len
                if lease is None
                else max(lease.kv_allocated_len, request.input_len)
            )
            for pool in range(len(total)):
                more = max(0, shape.most_pages(pool, goal) - shape.most_pages(pool, has))
                # Each choice but one has a last page of the prompt for itself, too.
                total[pool] += len(request.choices) * (more + 1) - 1
        return total
