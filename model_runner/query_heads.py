"""How queries weigh what a page holds: all that attention needs beside the pages' geometry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """The query heads of a model's layers."""

    count: int
    """A multiple of the pages' `num_kv_heads`; neighbours share a head of keys and values."""
    value_dim: int
    """Leading dimensions of a value that are summed: all of a value, the compressed part of a
    latent, whose other part only keys have."""
    scale: float
    """Products of queries and keys are multiplied by it."""
    softcap: float | None = None
    """Then they are bent into ``(-softcap, softcap)``: ``softcap * tanh(score / softcap)``."""
