"""A worker's load as it last reported it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool's account; the states from `free` to `quarantined` sum to `total`."""

    pool: str
    """Of pages: ``full``, ``window`` or ``latent``, with ``draft_`` before it for a draft model's.

    Or ``rows``.
    """
    page_size: int
    """Tokens a page; 0 for rows."""
    total: int
    free: int
    held: int
    cached_evictable: int
    cached_protected: int
    session: int
    quarantined: int
    promised: int
    """Still among the free, but running requests will grow into them."""


@dataclass(frozen=True, slots=True)
class PeerTransfer:
    """What a probe has found of the transport from a prefill worker."""

    incarnation: str
    backend: str
    transports: str
    read_gbps: float
    write_gbps: float
    refusal: str
    """Why nothing is read from it; empty if it is."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker has to do and what memory it has left."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    """Prompt tokens not yet computed or pulled."""
    pools: tuple[PoolState, ...] = ()
    growth_tokens: int = 0
    """That running requests are expected to add."""
    step_seconds: float = 0.0
    """A moving mean of a forward's; zero before the first."""
    draining: bool = False
    """It takes no more requests."""
    peers: tuple[PeerTransfer, ...] = ()
    """Of a decode worker, the prefill workers that it has met."""

    def refusal_of(self, incarnation: str) -> str:
        """Why this decode worker does not read from that prefill worker; empty if it may."""
        return next((peer.refusal for peer in self.peers if peer.incarnation == incarnation), "")

    @property
    def room_tokens(self) -> int:
        """Tokens that the first pool can still take; in tokens, so that page sizes may differ.

        What running requests are promised, or expected to add if that is more,
        is taken. Where there is a pool for windows, too, it comes second and
        fills up later.
        """
        return sum(
            (pool.free + pool.cached_evictable) * pool.page_size
            - max(pool.promised * pool.page_size, self.growth_tokens)
            for pool in self.pools[:1]
        )
