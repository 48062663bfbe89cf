"""The single exit: every request's memory leaves through `release_kv_cache`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from kvrelay.mem_cache.fence import Fence
from kvrelay.mem_cache.lease import Lease, LeaseState
from kvrelay.mem_cache.ledger import Ledger


class Outcome(StrEnum):
    """Why a request's memory is released: a metric's label, and what is worth keeping."""

    FINISHED = "finished"
    """It generated all that it will; its settled pages are published."""
    HANDED_OVER = "handed_over"
    """The decode side has the pages; the prefill side publishes its own."""
    ABORTED = "aborted"
    """Cancelled or failed; nothing is published."""


_PUBLISHED = frozenset({Outcome.FINISHED, Outcome.HANDED_OVER})


def release_kv_cache(
    ledger: Ledger,
    lease: Lease,
    outcome: Outcome,
    *,
    token_ids: Sequence[int] = (),
    fences: Iterable[Fence] = (),
) -> bool:
    """Give back everything that `lease` holds. Idempotent.

    Publishes the whole pages of ``min(kv_committed_len, len(token_ids))``
    tokens if `outcome` says so and nothing is in flight on them, gives back
    duplicates, the unaligned tail and the over-allocation, unlocks the prefix
    and frees the row last. What `fences` still protect goes to quarantine, from
    where `Ledger.reclaim` frees it. It reads the recorded lengths and infers
    none.

    Args:
        ledger: the account that `lease` belongs to.
        lease: what to release; closed by this call.
        outcome: why.
        token_ids: tokens whose KV the lease holds, as far as they are known.
        fences: forwards and transfers that may still read or write the pages.

    Returns:
        Whether there was anything to release.
    """
    if lease.state is LeaseState.RELEASED:
        return False
    lease.close()
    pending = [fence for fence in fences if not fence.passed()]
    if outcome in _PUBLISHED and not pending:
        ledger.publish(lease, token_ids)
    ledger.give_back(lease, pending)
    return True
