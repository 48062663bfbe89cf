"""The single exit: every request's memory leaves through `release_kv_cache`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.kv_cache_manager import NO_TOKENS, KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.prefix.prefix_index import TokenIds


class Outcome(StrEnum):
    """The reason why a request's memory is released; it decides what is kept."""

    FINISHED = "finished"
    """The request generated all its tokens; its written pages are published."""
    HANDED_OVER = "handed_over"
    """The decode side has the pages; the prefill side publishes its own."""
    RETRACTED = "retracted"
    """The request makes room and will be computed again. Its written pages are published: it may
    find them again, or they may be evicted."""
    ABORTED = "aborted"
    """The request was cancelled, or ended by a peer; nothing further is published."""
    FAILED = "failed"
    """A forward of it has failed. Its KV may be wrong, so its published pages are forgotten."""
    SAVED = "saved"
    """Its session keeps the memory for the next turn; only a page that was set aside is freed."""


_PUBLISHED = frozenset({Outcome.FINISHED, Outcome.HANDED_OVER, Outcome.RETRACTED})


def release_kv_cache(
    kv_cache: KVCacheManager,
    lease: Lease,
    outcome: Outcome,
    *,
    token_ids: TokenIds = NO_TOKENS,
    fences: Iterable[Fence] = (),
) -> bool:
    """Free everything that `lease` holds. Idempotent.

    If `outcome` says so, it publishes the whole pages of ``min(kv_committed_len, len(token_ids))``
    tokens. It frees duplicates, the unaligned tail and the over-allocation, unlocks the prefix and
    frees the row last.

    Memory that `fences` still protect goes to quarantine, from where `PageAllocator.reclaim` frees
    it. A published prefix stays locked until then. All lengths are the recorded ones; none is
    inferred.

    Args:
        kv_cache: the manager that opened `lease`.
        lease: the lease to release; closed by this call, except for `SAVED`.
        outcome: the reason.
        token_ids: the tokens whose KV is written, by forwards and transfers that have ended.
        fences: forwards and transfers that may still read or write the pages.

    Returns:
        Whether there was anything to release.
    """
    if lease.state is LeaseState.RELEASED:
        return False
    pending = [fence for fence in fences if not fence.passed()]
    if outcome is Outcome.SAVED:
        kv_cache.leases.save(lease, pending)
        return True
    kv_cache.leases.close_lease(lease)
    if outcome in _PUBLISHED:
        kv_cache.sharing.publish(lease, token_ids, pending)
    elif outcome is Outcome.FAILED:
        kv_cache.forget(lease, token_ids)
    kv_cache.leases.end_lease(lease, pending)
    return True
