"""The query heads of a model: all that attention needs beside the geometry of its pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """The query heads of a model's layers, and how scores are made of them."""

    num_heads: int
    """A multiple of the pages' `num_kv_heads`; neighbours share a head of keys and values."""
    value_dim: int
    """Leading dimensions of a cached head that are summed as its value: all of a value, or the
    first `kv_lora_rank` of a latent's, the others of which are of the key alone."""
    scale: float
    """Products of queries and keys are multiplied by it."""
    softcap: float | None = None
    """Then they are brought into ``(-softcap, softcap)``: ``softcap * tanh(score / softcap)``."""


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    """The heads of keys and values that are made of latents."""

    key_dim: int
    """Of a head's query and key."""
    value_dim: int
    """Of its value."""
    least_new_tokens: int
    """A sequence that brings fewer costs less with its queries brought to the latents' space."""
