"""The single exit: every request's memory leaves through `release_kv_cache`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.ledger import NO_TOKENS, Ledger
from kvrelay.mem_cache.prefix_index import TokenIds


class Outcome(StrEnum):
    """Why a request's memory is released: a metric's label, and what is worth keeping."""

    FINISHED = "finished"
    """It generated all that it will; its settled pages are published."""
    HANDED_OVER = "handed_over"
    """The decode side has the pages; the prefill side publishes its own."""
    RETRACTED = "retracted"
    """It makes room for others and will be computed again; its settled pages are published,
    where they may be found again or be evicted."""
    ABORTED = "aborted"
    """Cancelled or failed; nothing is published."""
    SAVED = "saved"
    """Its session keeps the memory for the next turn; nothing is given back."""


_PUBLISHED = frozenset({Outcome.FINISHED, Outcome.HANDED_OVER, Outcome.RETRACTED})


def release_kv_cache(
    ledger: Ledger,
    lease: Lease,
    outcome: Outcome,
    *,
    token_ids: TokenIds = NO_TOKENS,
    fences: Iterable[Fence] = (),
) -> bool:
    """Give back everything that `lease` holds. Idempotent.

    Publishes the whole pages of ``min(kv_committed_len, len(token_ids))``
    tokens if `outcome` says so, gives back duplicates, the unaligned tail and
    the over-allocation, unlocks the prefix and frees the row last. What
    `fences` still protect goes to quarantine, from where `Ledger.reclaim` frees
    it; a published prefix stays locked until then. It reads the recorded
    lengths and infers none.

    Args:
        ledger: the account that `lease` belongs to.
        lease: what to release; closed by this call, but for `SAVED`.
        outcome: why.
        token_ids: the tokens whose KV is settled: written, and written by nobody any more.
        fences: forwards and transfers that may still read or write the pages.

    Returns:
        Whether there was anything to release.
    """
    if lease.state is LeaseState.RELEASED:
        return False
    pending = [fence for fence in fences if not fence.passed()]
    if outcome is Outcome.SAVED:
        ledger.save(lease, pending)
        return True
    ledger.close(lease)
    if outcome in _PUBLISHED:
        ledger.publish(lease, token_ids, pending)
    ledger.give_back(lease, pending)
    return True
