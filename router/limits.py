"""What the model and its workers can take: a request beyond it is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.router.discovery import WorkerEndpoint, WorkerRole
from kvrelay.router.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request."""

    vocab_size: int
    max_model_len: int
    """Tokens, prompt and output together."""
    prefill_pool_tokens: int
    """Of the largest pool that prompts are computed in: a prompt must fit."""
    decode_pool_tokens: int
    """Of the largest pool that outputs grow in: prompt and output together must fit."""

    @classmethod
    def of(cls, endpoints: Sequence[WorkerEndpoint]) -> Limits:
        """What these workers can take.

        In a fleet of both kinds, what the pairs can take or the aggregated
        workers, whichever take more: no request needs some of each.

        Raises:
            Unavailable: there is neither a pair nor an aggregated worker.
        """
        prefill = _largest_pool(endpoints, WorkerRole.PREFILL)
        decode = _largest_pool(endpoints, WorkerRole.DECODE)
        aggregated = _largest_pool(endpoints, WorkerRole.AGGREGATED)
        if aggregated > (decode if prefill else 0):
            prefill = decode = aggregated
        for pool, role in ((prefill, WorkerRole.PREFILL), (decode, WorkerRole.DECODE)):
            if not pool:
                raise Unavailable(f"there is no {role} worker")
        return cls(
            vocab_size=min(e.vocab_size for e in endpoints),
            max_model_len=min(e.max_model_len for e in endpoints),
            prefill_pool_tokens=prefill,
            decode_pool_tokens=decode,
        )


def _largest_pool(endpoints: Sequence[WorkerEndpoint], role: WorkerRole) -> int:
    """In tokens; zero without any."""
    return max((e.pool_tokens for e in endpoints if e.role is role), default=0)
