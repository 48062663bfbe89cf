"""The layers of a model whose keys and values share a pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLayers:
    """The layers of one pool: all keep the same heads of a token, for as many tokens."""

    num_layers: int
    num_kv_heads: int
    """Heads of a token in a page; 1 for latents."""
    head_dim: int
    """Dimensions of a head in a page."""
    latent: bool = False
    """Whether a token has one latent vector instead of keys and values."""
    window: int | None = None
    """The number of last tokens that a token sees, itself included; None: it sees all."""
