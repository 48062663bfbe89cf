"""What a worker reports of its load and its memory; what placement and operators read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvrelay.wire.speeds import UNMEASURED, StepSpeeds
from kvrelay.wire.worker_info import WorkerRole

PAGE_STATES: Final = (
    "free",
    "held",
    "cached_evictable",
    "cached_protected",
    "session",
    "quarantined",
    "in_flight",
)
"""What a page can be: a field of `PoolCounts` each, which sum to its `total`."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's account at one moment, in pages (or rows); the states sum to `total`.

    `promised` pages are still among the free, or evictable: running requests
    may grow into them, so nobody else is admitted on their account.
    """

    pool: str
    """Of pages: ``full``, ``window`` or ``latent``, with ``draft_`` before it for a draft model's.

    Or ``host`` or ``storage``, whose pages are those of all these pools together, but for windows':
    on the host each has a pool of its own, like ``host_window``. Or ``rows``.
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
    in_flight: int = 0
    """Copies between tiers read or write them, and nobody else does."""

    @property
    def accounted(self) -> int:
        """The sum of all states."""
        return (
            self.free
            + self.held
            + self.cached_evictable
            + self.cached_protected
            + self.session
            + self.quarantined
            + self.in_flight
        )


@dataclass(frozen=True, slots=True)
class PeerTransport:
    """What a decode worker has found the transport from a prefill worker to be."""

    incarnation: str
    """The prefill worker's."""
    backend: str = ""
    """NIXL's, e.g. ``UCX``."""
    transports: str = ""
    """Those that the backend may choose from, as far as it was told."""
    read_bytes_per_second: float = 0.0
    """From the peer, in pieces of the pool's real size."""
    write_bytes_per_second: float = 0.0
    """To the peer: what it reads of sessions goes this way."""
    lent_tokens_per_second: float = 0.0
    """Tokens of sessions that the peer reads from here; 0: none are lent."""
    refusal: str = ""
    """Why nothing is read from the peer; empty if it is."""
    host_bytes_per_second: float = 0.0
    """From the peer's host tier; 0: it has none, or it cannot be read."""
    host_refusal: str = ""
    """Why nothing is read from the peer's host tier; empty if it is, or if it has none."""

    def __str__(self) -> str:
        speed = self.read_bytes_per_second / 1e9
        return f"{speed:.3g} GB/s by {self.backend} ({self.transports})"


@dataclass(frozen=True, slots=True)
class QuarantineState:
    """Memory in quarantine for one reason."""

    reason: str
    """What it waits for: a ``forward``, a ``read`` that runs, or a ``failed_read``."""
    pages: int
    """Of all pools."""
    seconds: int
    """That the oldest has waited; whole ones, so that the load does not change all the time."""


def sum_by_size(prompts: Iterable[int]) -> tuple[int, ...]:
    """The tokens of prompts by their size, as in `WorkerLoad.prompts_by_size`.

    Args:
        prompts: how many tokens each has; those with none are left out.
    """
    sums: list[int] = []
    for tokens in prompts:
        missing = tokens.bit_length() - len(sums)
        if missing > 0:
            sums += [0] * missing
        if tokens:
            sums[tokens.bit_length() - 1] += tokens
    return tuple(sums)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker has to do, and what memory it has left."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that are not yet computed, or not yet pulled."""
    pools: tuple[PoolCounts, ...] = ()
    growth_tokens: int = 0
    """Tokens that running requests are expected to add."""
    output_tokens: int = 0
    """A request is expected to generate so many, as earlier ones did; 0: none has ended yet."""
    speeds: StepSpeeds = UNMEASURED
    """What its steps cost, as it has learnt."""
    prompts_by_size: tuple[int, ...] = ()
    """Tokens that are not computed, of all prompts that have ``[2**i, 2**(i+1))`` of them, by i.

    Of a worker that computes prompts; without those of a priority above 0, which run later.
    """
    reused_share: float = 0.0
    """The largest share of an input that its prefix index had, lately; it fades by and by."""
    draining: bool = False
    """The worker takes no more requests."""
    peers: tuple[PeerTransport, ...] = ()
    """Of a decode worker: the prefill workers that it has met."""
    quarantine: tuple[QuarantineState, ...] = ()
    """What is in quarantine, by reason."""
    storage_error: str = ""
    """Why nothing is written to storage; empty if it is, or if there is none."""
    session_locked_tokens: int = 0
    """Of cached prefixes, that sessions lock between their turns: they come back when needed."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting_requests and not self.running_requests

    @property
    def refused_peers(self) -> Mapping[str, str]:
        """The incarnations that this decode worker does not read from, and why."""
        return {peer.incarnation: peer.refusal for peer in self.peers if peer.refusal}

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV requests have in the first pool, shared ones once; not sessions'."""
        return sum(
            (pool.held + pool.cached_protected) * pool.page_size - self._locked_by_sessions(pool)
            for pool in self.pools[:1]
        )

    @property
    def room_tokens(self) -> int:
        """Tokens that the first pool can still take; in tokens, so that page sizes may differ.

        What running requests are promised, or expected to add if that is more,
        is taken; what sessions keep between their turns is not. Where there is a pool for
        windows, too, it comes second and fills up later.
        """
        return sum(
            (pool.free + pool.cached_evictable + pool.session) * pool.page_size
            + self._locked_by_sessions(pool)
            - max(pool.promised * pool.page_size, self.growth_tokens)
            for pool in self.pools[:1]
        )

    def _locked_by_sessions(self, pool: PoolCounts) -> int:
        """Tokens; several sessions may lock the same pages."""
        return min(self.session_locked_tokens, pool.cached_protected * pool.page_size)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router shows it to operators."""

    worker: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: WorkerRole
    incarnation: str
    address: str
    metrics_address: str
    ready: bool
    draining: bool
    load: WorkerLoad
    model_digest: str = ""
    """The name of what it has loaded."""
    refusal: str = ""
    """Why it gets no requests; empty if it gets some."""
    kv_events_address: str = ""
    """Where it publishes KV events; empty if it does not."""

    def for_tenants(self) -> WorkerStatus:
        """Without what tells of other tenants' prompts, or of this machine's files."""
        load = replace(self.load, reused_share=0.0, storage_error="")
        return replace(self, load=load, kv_events_address="")
