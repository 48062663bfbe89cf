"""How FlashInfer's kernels divide the keys and values of a sequence among blocks of threads.

Partial results are summed, so the division decides about the last bits of a result. By default it
depends on the batch: a sequence alone gets as many blocks as the GPU has room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.choice import AttentionSplits
from kvrelay.model_runner.config.query_heads import QueryHeads

CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads a KV head that the decode kernels without tensor cores compute. They have 4, 6, 8
and 16, too, where tensor cores are faster; 5 and 7 they have not."""
FIXED_TOKENS: Final = 2048
"""Of each piece of a sequence, if that is fixed."""


@dataclass(frozen=True)
class KVSplits:
    """What FlashInfer's wrappers are told about it.

    Args:
        choice: what the user wants.
        graphs: there are CUDA graphs of decode. What a graph launches cannot depend on lengths,
            so a sequence is not divided in decode then, with or without a graph.
    """

    choice: AttentionSplits = AttentionSplits.BATCH
    graphs: bool = False

    @property
    def are_fixed(self) -> bool:
        """Whether they are alike in every batch."""
        return self.choice is AttentionSplits.FIXED

    def tensor_cores(self, geometry: KVGeometry, heads: QueryHeads) -> bool:
        """Whether decode computes by tensor cores: those kernels alone can be told."""
        return self.are_fixed or heads.num_heads // geometry.num_kv_heads not in CUDA_CORE_GROUPS

    def of_decode(self, page_size: int) -> dict[str, object]:
        """Options of the plan for one new token of each sequence."""
        if self.are_fixed and self.graphs:
            return {"disable_split_kv": True}
        return self.of_prefill(page_size)

    def of_prefill(self, page_size: int) -> dict[str, object]:
        """Options of the plan for any number of new tokens."""
        if not self.are_fixed:
            return {}
        return {"fixed_split_size": max(1, FIXED_TOKENS // page_size)}
