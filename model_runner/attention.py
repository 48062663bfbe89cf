"""The seam between the decoder and whatever computes attention over paged KV."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.cpu_attention import CpuAttention
from kvrelay.model_runner.torch_attention import TorchAttention


class StepAttention(Protocol):
    """Attention of one forward: its batch, laid out for the backend once for all layers."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write this forward's keys and values of `layer` into the pool, and attend.

        Args:
            layer: the pool's layer.
            qkv: ``[T, num_heads + 2 * num_kv_heads, head_dim]`` contiguous: the
                heads of queries, keys, values, in the pool's dtype and already rotated.

        Returns:
            ``[T, num_heads * head_dim]`` in the same dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention with grouped heads over the pages of one pool."""

    def plan(self, batch: ForwardBatch) -> StepAttention:
        """Prepare `batch`; keeps no state, so several plans may be alive."""
        ...


def make_attention(pool: KVPool, num_heads: int) -> AttentionBackend:
    """The fastest backend for the pool's device and dtype."""
    if CpuAttention.supports(pool):
        return CpuAttention(pool, num_heads)
    return TorchAttention(pool, num_heads)
