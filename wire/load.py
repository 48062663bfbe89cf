"""A worker's report of its load and its memory, which placement and operators read."""

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
"""The states of a page. Each is a field of `PoolCounts`, and they sum to its `total`."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's account at one moment, in pages (or rows); the states sum to `total`.

    `promised` pages are still free or evictable. Running requests may grow into them, so no other
    request is admitted to them.
    """

    pool: str
    """The pool's name: of pages, ``full``, ``window`` or ``latent``; of rows, ``rows``.

    A draft model's pools have ``draft_`` before it. ``host`` and ``storage`` are tiers with
    the pages of all these pools together. Window pools are apart on the host, as ``host_window``.
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
    """Pages that copies between tiers read or write, and nobody else does."""

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
    """The properties of the transport from a prefill worker, as a decode worker has found them."""

    incarnation: str
    """The prefill worker's incarnation."""
    backend: str = ""
    """The name of NIXL's backend, e.g. ``UCX``."""
    transports: str = ""
    """The transports that the backend may choose from, as far as it was told."""
    read_bytes_per_second: float = 0.0
    """Speed of reads from the peer, in pieces of the pool's real size."""
    write_bytes_per_second: float = 0.0
    """Speed of writes to the peer: what it reads of this worker's KV goes this way."""
    lent_tokens_per_second: float = 0.0
    """Speed at which the peer reads tokens of prompts from here; 0: none are lent."""
    refusal: str = ""
    """Why nothing is read from the peer; empty if it is read from."""
    host_bytes_per_second: float = 0.0
    """Speed of reads from the peer's host tier; 0: it has none, or it cannot be read."""
    host_refusal: str = ""
    """Why nothing is read from the peer's host tier; empty if it is read, or if there is none."""

    def __str__(self) -> str:
        speed = self.read_bytes_per_second / 1e9
        return f"{speed:.3g} GB/s by {self.backend} ({self.transports})"


@dataclass(frozen=True, slots=True)
class QuarantineState:
    """Memory in quarantine for one reason."""

    reason: str
    """The event that it waits for: a ``forward``, a running ``read``, or a ``failed_read``."""
    pages: int
    """The number of pages, of all pools."""
    seconds: int
    """The age of the oldest in whole seconds, so that the load does not change all the time."""


def sum_by_size(prompts: Iterable[int]) -> tuple[int, ...]:
    """The tokens of prompts by their size, as in `WorkerLoad.prompts_by_size`.

    Args:
        prompts: the number of tokens of each prompt; prompts without any are left out.
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
    """One worker's work, and the memory that it has left."""

    waiting_requests: int = 0
    running_requests: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that are not yet computed, or not yet pulled."""
    pools: tuple[PoolCounts, ...] = ()
    growth_tokens: int = 0
    """Tokens that running requests are expected to add."""
    output_tokens: int = 0
    """Output tokens expected of a request, judged by earlier ones; 0: none has ended yet."""
    speeds: StepSpeeds = UNMEASURED
    """The costs of its steps, as it has learnt them."""
    prompts_by_size: tuple[int, ...] = ()
    """Prompt tokens not yet computed, summed by how many of them a prompt has.

    Entry ``i`` is the sum over prompts that have ``[2**i, 2**(i+1))`` such tokens. Only a worker
    that computes prompts reports it, without prompts of a priority above 0, which run later.
    """
    reused_share: float = 0.0
    """The largest share of an input found lately in its prefix index; it decays with time."""
    draining: bool = False
    """The worker takes no more requests."""
    peers: tuple[PeerTransport, ...] = ()
    """The prefill workers that a decode worker has met."""
    quarantine: tuple[QuarantineState, ...] = ()
    """The memory in quarantine, by reason."""
    storage_error: str = ""
    """Why nothing is written to storage; empty if it is written, or if there is no storage."""
    session_locked_tokens: int = 0
    """Tokens of cached prefixes that sessions lock between turns, until the room is needed."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting_requests and not self.running_requests

    @property
    def refused_peers(self) -> Mapping[str, str]:
        """The incarnations that this decode worker does not read from, each with the reason."""
        return {peer.incarnation: peer.refusal for peer in self.peers if peer.refusal}

    @property
    def held_tokens(self) -> int:
        """Tokens of KV that requests hold in the first pool, shared ones once; not sessions'."""
        return sum(
            (pool.held + pool.cached_protected) * pool.page_size - self._locked_by_sessions(pool)
            for pool in self.pools[:1]
        )

    @property
    def room_tokens(self) -> int:
        """Tokens that the first pool can still take; in tokens, so that page sizes may differ.

        Memory promised to running requests, or what they are expected to add if that is more,
        counts as taken. Memory that sessions keep between turns does not. A window pool is not
        looked at: it comes second, and fills up later.
        """
        return sum(
            (pool.free + pool.cached_evictable + pool.session) * pool.page_size
            + self._locked_by_sessions(pool)
            - max(pool.promised * pool.page_size, self.growth_tokens)
            for pool in self.pools[:1]
        )

    def _locked_by_sessions(self, pool: PoolCounts) -> int:
        """Tokens that sessions lock, at most the protected: several may lock the same pages."""
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
    """The `name` of the digest of what it has loaded."""
    refusal: str = ""
    """Why it gets no requests; empty if it gets requests."""
    kv_events_address: str = ""
    """Where it publishes KV events; empty if it does not."""

    def for_tenants(self) -> WorkerStatus:
        """A copy without what tells of other tenants' prompts, or of this machine's files."""
        load = replace(self.load, reused_share=0.0, storage_error="")
        return replace(self, load=load, kv_events_address="")
