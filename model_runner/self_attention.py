"""The first half of a layer, in which tokens see each other: two ways of making keys and values."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.model_runner.attention import StepAttention
from kvrelay.model_runner.elementwise import rms_norm
from kvrelay.model_runner.loader import Loader
from kvrelay.model_runner.model_config import GroupedHeads, LatentHeads

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a batch's positions, each ``[T, rotary_dim / 2]`` float32."""

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the model's other norms have."""


class SelfAttention(Protocol):
    """A layer's attention with the products around it."""

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> torch.Tensor:
        """``residual`` and the attention of `x`, all ``[T, hidden_size]``.

        Writes `layer` of the pool that `attention` is about.
        """
        ...


class GroupedAttention:
    """See `SelfAttention`. Queries, keys and values in one product."""

    def __init__(self, loader: Loader, heads: GroupedHeads, prefix: str, norm: str) -> None:
        self._heads = heads
        self._eps = loader.config.rms_norm_eps
        self._elementwise = loader.elementwise
        query_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = loader.linear(prefix, parts, loader.config.hidden_size, heads.qkv_bias)
        self._output = loader.output(prefix, "o_proj", query_size, heads.output_bias, norm)
        self._head_norm = self._load_head_norm(loader, prefix) if heads.normed else None

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> torch.Tensor:
        """See `SelfAttention`."""
        rows = self._qkv(x).view(len(x), -1, self._heads.head_dim)
        turning = self._heads.num_heads + self._heads.num_kv_heads
        if self._head_norm is not None:
            rows[:, :turning] = rms_norm(rows[:, :turning], self._head_norm, self._eps)
        self._elementwise.rotate(rows, turning, *rotation)
        return self._output.add_to(residual, attention.attend(layer, rows))

    def _load_head_norm(self, loader: Loader, prefix: str) -> torch.Tensor:
        """Weights of the query heads', then the key heads' norm, a row a head."""
        heads = self._heads
        query = loader.norm_weight(f"{prefix}.q_norm", heads.head_dim)
        key = loader.norm_weight(f"{prefix}.k_norm", heads.head_dim)
        return torch.cat((query.expand(heads.num_heads, -1), key.expand(heads.num_kv_heads, -1)))


class LatentAttention:
    """See `SelfAttention`. A token's keys and values stay compressed in one latent.

    Instead of expanding every cached latent, queries are brought to its space
    and sums of latents back to values: "absorption", DeepSeek-V2 (arXiv
    2405.04434), section 2.1.2. With ``key = up_key @ latent``::

        query . (up_key @ latent)  =  (up_key^T @ query) . latent

    so that all heads share one cached head: latent, then rotated key.
    """

    def __init__(self, loader: Loader, heads: LatentHeads, prefix: str, norm: str) -> None:
        self._heads = heads
        self._elementwise = loader.elementwise
        hidden_size = loader.config.hidden_size
        self._query_parts = [heads.plain_dim, heads.rotary_dim]
        self._cached_parts = [heads.latent_dim, heads.rotary_dim]
        query_dim = sum(self._query_parts)
        query_size = heads.num_heads * query_dim
        query_order = _halves_apart(heads, query_dim, heads.num_heads)
        if heads.query_rank is None:
            self._compress_query = None
            self._query = loader.linear(
                prefix, {"q_proj": query_size}, hidden_size, order=query_order
            )
        else:
            rank = heads.query_rank
            self._compress_query = loader.linear(
                prefix, {"q_a_proj": rank}, hidden_size, heads.bias
            )
            self._query_norm = loader.norm(f"{prefix}.q_a_layernorm", rank, _LATENT_EPS)
            self._query = loader.linear(prefix, {"q_b_proj": query_size}, rank, order=query_order)
        self._compress = loader.linear(
            prefix,
            {"kv_a_proj_with_mqa": heads.cached_dim},
            hidden_size,
            heads.bias,
            order=_halves_apart(heads, heads.cached_dim, 1),
        )
        self._latent_norm = loader.norm(f"{prefix}.kv_a_layernorm", heads.latent_dim, _LATENT_EPS)
        self._up_key, self._up_value = self._load_up(loader, prefix)
        value_size = heads.num_heads * heads.value_dim
        self._output = loader.output(prefix, "o_proj", value_size, heads.bias, norm)

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> torch.Tensor:
        """See `SelfAttention`."""
        heads = self._heads
        rows = x.new_empty(len(x), heads.num_heads + 1, heads.cached_dim)
        latents, turning = torch.split(rows, self._cached_parts, dim=2)
        plain, rotary = torch.split(self._queries(x), self._query_parts, dim=2)
        latent, shared_key = torch.split(self._compress(x), self._cached_parts, dim=1)
        latents[:, :-1] = (plain.transpose(0, 1) @ self._up_key).transpose(0, 1)
        latents[:, -1] = self._latent_norm(latent.contiguous())
        turned = torch.cat((rotary, shared_key[:, None]), dim=1)
        self._elementwise.rotate(turned, heads.num_heads + 1, *rotation)
        turning.copy_(turned)
        sums = attention.attend(layer, rows).view(len(x), heads.num_heads, heads.latent_dim)
        values = (sums.transpose(0, 1) @ self._up_value).transpose(0, 1)
        return self._output.add_to(residual, values.flatten(1))

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, num_heads, plain_dim + rotary_dim]``"""
        if self._compress_query is not None:
            x = self._query_norm(self._compress_query(x))
        return self._query(x).view(len(x), self._heads.num_heads, -1)

    def _load_up(self, loader: Loader, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``[heads, plain_dim, latent_dim]`` of keys, ``[heads, latent_dim, value_dim]``."""
        heads = self._heads
        parts = [heads.plain_dim, heads.value_dim]
        shape = (heads.num_heads * sum(parts), heads.latent_dim)
        both = loader.checkpoint.take(f"{prefix}.kv_b_proj.weight", shape)
        key, value = torch.split(both.view(heads.num_heads, sum(parts), -1), parts, dim=1)
        return key.contiguous(), value.transpose(1, 2).contiguous()


def make_self_attention(loader: Loader, prefix: str, norm: str) -> SelfAttention:
    """The attention `prefix` of the checkpoint; see `Loader.output` for `norm`."""
    heads = loader.config.heads
    if isinstance(heads, LatentHeads):
        return LatentAttention(loader, heads, prefix, norm)
    return GroupedAttention(loader, heads, prefix, norm)


def _halves_apart(heads: LatentHeads, dim: int, count: int) -> torch.Tensor | None:
    """What of the checkpoint's outputs, `count` heads of `dim`, goes where: see `Loader.linear`.

    A head's last dimensions rotate; they are put so that halves turn with each
    other, as in `Elementwise.rotate`. Products of queries and keys stay the same.
    """
    if not heads.interleaved:
        return None
    head = torch.arange(dim)
    plain, rotary = head[: -heads.rotary_dim], head[-heads.rotary_dim :]
    order = torch.cat((plain, rotary[0::2], rotary[1::2]))
    return torch.cat([order + index * dim for index in range(count)])
