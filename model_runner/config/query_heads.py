"""The query heads of a model: all that attention needs beside the geometry of its pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """The query heads of a model's layers, and how scores are made of them."""

    num_heads: int
    """The query heads, a multiple of the pages' `num_kv_heads`; neighbours share a KV head."""
    value_dim: int
    """The leading dimensions of a cached head that are summed as its value.

    They are all of a value, or the first `kv_lora_rank` of a latent. A latent's other dimensions
    belong to the key alone.
    """
    scale: float
    """The factor of products of queries and keys."""
    softcap: float | None = None
    """The bound of scores: ``softcap * tanh(score / softcap)``; None: there is no bound."""


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    """The heads of keys and values that are made of latents."""

    key_dim: int
    """The dimensions of a head's query and key."""
    value_dim: int
    """The dimensions of a head's value."""
    least_new_tokens: int
    """The fewest new tokens of a sequence for which that costs less than absorption."""
