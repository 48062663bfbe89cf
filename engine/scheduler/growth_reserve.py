"""An estimate of the memory that running requests will still need; admission leaves it free."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager

_WEIGHT = 1 / 16
"""The weight of the latest request in the moving mean."""
_RETRACTION_RAISE = 1.5
"""The factor by which a retraction raises the estimate, which was too low."""
_FIRST_OPEN_TOKENS = 256.0
"""The expected output of a request without a limit, before one has ended."""


class GrowthReserve:
    """An estimate of output lengths as a part of `max_tokens`, learned from requests that finished.

    Of a request whose client has set no `max_tokens` it is the mean output of others like it.
    No request owns the reserve: it only keeps new requests out, so that running ones can grow
    without a retraction. It starts at its upper bound and learns. The model is SGLang's
    `new_token_ratio`, which decays by itself.

    Args:
        kv_cache: manages the memory that the requests grow in.
        least: the smallest part of `max_tokens` that is ever reserved for a request, in [0, 1].
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
        self._open_tokens = _FIRST_OPEN_TOKENS

    @property
    def mean_output_tokens(self) -> int:
        """The moving mean of the tokens that a request generates; 0 before one has ended."""
        return round(self._mean_output)

    def learn_from_finish(self, request: Request) -> None:
        """Move the estimate towards the output length of a request that ended by itself."""
        tokens = len(request.output_ids)
        self._mean_output += (_WEIGHT if self._mean_output else 1) * (tokens - self._mean_output)
        if request.open_ended:
            self._open_tokens += _WEIGHT * (tokens - self._open_tokens)
            return
        part = tokens / request.params.stops.max_tokens
        self._set(self._part + _WEIGHT * (part - self._part))

    def learn_from_retraction(self) -> None:
        """Raise the estimate: memory ran short, so it was too low."""
        self._set(max(self._part, _WEIGHT) * _RETRACTION_RAISE)
        raised = max(self._open_tokens, 1.0) * _RETRACTION_RAISE
        self._open_tokens = min(raised, self._kv_cache.max_lease_tokens)

    def _set(self, part: float) -> None:
        self._part = min(max(part, self._least), self._most)

    def tokens(self, request: Request) -> int:
        """Estimate the tokens that the request will still generate, at least its next one."""
        return self.total_tokens((request,))

    def total_tokens(self, requests: Iterable[Request]) -> int:
        """Sum `tokens` over the requests."""
        total, part = 0, self._part
        for request in requests:
            most, has = request.params.stops.max_tokens, len(request.output_ids)
            length = part * most
            if request.open_ended:
                length = min(self._open_tokens, self._most * most)
            expected, left = ceil(length) - has, most - has
            # Calls of `min` and `max` would take longer than everything else here.
            if expected < 1:
                expected = 1
            if expected > left:
                expected = left
            total += expected
        return total

    def headroom(self, request: Request, others: Iterable[Request]) -> list[int] | None:
        """Compute the pages of each pool that must stay free when `request` is admitted.

        None if there are no `others`. A lone request would wait forever if its choices did not fit
        together. So it is admitted, some choices are retracted, and they go on when there is room.
        """
        growing = [*others, request]
        return self.pages(growing) if len(growing) > 1 else None

    def pages(self, requests: Iterable[Request]) -> list[int]:
        """Estimate the pages of each pool that the requests will need beyond what they have.

        A request without memory counts as having its input's pages.
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
