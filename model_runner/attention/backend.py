"""The interface of attention over paged KV, and the choice of what implements it."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.query_heads import QueryHeads


class StepAttention(Protocol):
    """Attention of one forward: its batch, laid out for the backend once for a pool's layers."""

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write this forward's keys and values of `layer` into the pool, and attend.

        Args:
            layer: the pool's layer.
            rows: ``[T, num_heads + parts * num_kv_heads, head_dim]`` contiguous: the
                heads of queries, keys, values (or queries and the latent), in the
                pool's dtype and already rotated.

        Returns:
            ``[T, num_heads * value_dim]`` in the same dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention with grouped heads over the pages of one pool, within its window."""

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> StepAttention:
        """Prepare `batch` with its table for this pool; keeps no state: several may be alive."""
        ...


def make_attention(
    pool: KVPool, heads: QueryHeads, batch_invariant: bool = False
) -> AttentionBackend:
    """The fastest backend for the pool's device and dtype.

    If it must be batch invariant, `CpuAttention` must be able to run there.
    """
    if CpuAttention.runs(pool.data.device, pool.data.dtype):
        return CpuAttention(pool, heads, by_token=batch_invariant)
    assert not batch_invariant
    return TorchAttention(pool, heads)
