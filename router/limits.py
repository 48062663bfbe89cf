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
    """Of the largest prefill pool: a prompt must fit."""
    decode_pool_tokens: int
    """Of the largest decode pool: prompt and output together must fit."""

    @classmethod
    def of(cls, endpoints: Sequence[WorkerEndpoint]) -> Limits:
        """What these workers can take.

        Raises:
            Unavailable: one of the two roles is missing.
        """
        return cls(
            vocab_size=min((e.vocab_size for e in endpoints), default=0),
            max_model_len=min((e.max_model_len for e in endpoints), default=0),
            prefill_pool_tokens=_largest_pool(endpoints, WorkerRole.PREFILL),
            decode_pool_tokens=_largest_pool(endpoints, WorkerRole.DECODE),
        )


def _largest_pool(endpoints: Sequence[WorkerEndpoint], role: WorkerRole) -> int:
    pools = [endpoint.pool_tokens for endpoint in endpoints if endpoint.role is role]
    if not pools:
        raise Unavailable(f"there is no {role} worker")
    return max(pools)
