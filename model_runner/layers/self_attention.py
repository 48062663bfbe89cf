"""The first half of a layer, in which tokens see each other: two ways of making keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from kvrelay.model_runner.attention.backend import StepAttention
from kvrelay.model_runner.attention.expanded_latents import ExpandedStep, SplitLatents
from kvrelay.model_runner.batch import Int64Array
from kvrelay.model_runner.config.model_config import GQAConfig, MLAConfig, QKNorm
from kvrelay.model_runner.layers.elementwise import HeadNormWeights, Rotation
from kvrelay.model_runner.layers.hidden import Hidden
from kvrelay.model_runner.layers.loader import WeightLoader
from kvrelay.model_runner.layers.norm import HeadNorm, TokenNorm

_LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, whatever the model's other norms have."""


class SelfAttention(Protocol):
    """A layer's attention with the products around it."""

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> Hidden:
        """``residual`` and the attention of `x`, all ``[T, hidden_size]``.

        It writes keys and values to `layer` of the pool of `attention`.
        """
        ...


class GroupedQueryAttention:
    """Grouped-query attention; queries, keys and values are made by one product."""

    def __init__(self, loader: WeightLoader, heads: GQAConfig, prefix: str, norm: str) -> None:
        self._heads = heads
        self._elementwise = loader.elementwise
        query_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = loader.linear(prefix, parts, loader.config.hidden_size, heads.qkv_bias)
        self._output = loader.output(prefix, "o_proj", query_size, heads.output_bias, norm)
        self._head_norm = self._load_head_norm(loader, prefix)
        self._sinks = None
        if heads.has_sinks:
            self._sinks = loader.checkpoint.take(
                f"{prefix}.sinks", (heads.num_heads,), torch.float32
            )

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> Hidden:
        """Write `layer` of the pool; return ``residual`` and the attention of `x`."""
        rows = self._qkv(x).view(len(x), -1, self._heads.head_dim)
        turning = self._heads.num_heads + self._heads.num_kv_heads
        if self._head_norm is not None:
            self._head_norm(rows)
        self._elementwise.rotate(rows, turning, rotation)
        return self._output.add_to(residual, attention.attend(layer, rows, self._sinks))

    def _load_head_norm(self, loader: WeightLoader, prefix: str) -> HeadNorm | TokenNorm | None:
        heads = self._heads
        if heads.qk_norm is QKNorm.NONE:
            return None
        if heads.qk_norm is QKNorm.ALL_HEADS:
            return TokenNorm(
                loader.norm(f"{prefix}.q_norm", heads.num_heads * heads.head_dim),
                loader.norm(f"{prefix}.k_norm", heads.num_kv_heads * heads.head_dim),
                heads.num_heads,
                heads.num_kv_heads,
            )
        query = loader.norm_weight(f"{prefix}.q_norm", heads.head_dim)
        key = loader.norm_weight(f"{prefix}.k_norm", heads.head_dim)
        weights = HeadNormWeights.of(query, key, heads.num_heads, heads.num_kv_heads)
        return HeadNorm(loader.elementwise, weights, loader.config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class LatentTokens:
    """The results of a layer's first products for tokens, before they attend."""

    unrotated: torch.Tensor
    """``[T, num_heads, qk_nope_head_dim]``: the part of queries that does not rotate."""
    turned: torch.Tensor
    """``[T, num_heads + 1, qk_rope_head_dim]``: rotated, of queries and of the shared key."""
    latent: torch.Tensor
    """``[T, kv_lora_rank]``"""

    def take(self, rows: torch.Tensor) -> LatentTokens:
        """The results for some of the tokens."""
        return LatentTokens(self.unrotated[rows], self.turned[rows], self.latent[rows])


class MultiHeadLatentAttention:
    """MLA: a token's keys and values stay compressed in one latent.

    Queries are brought to the latents' space, and sums of latents back to values, instead of
    expanding every cached latent. This is "absorption", DeepSeek-V2 (arXiv 2405.04434), section
    2.1.2; `SplitLatents` expands for long chunks. With ``key = w_uk @ latent``::

        query . (w_uk @ latent)  =  (w_uk^T @ query) . latent

    so that all heads share one cached head: latent, then rotated key.
    """

    def __init__(self, loader: WeightLoader, heads: MLAConfig, prefix: str, norm: str) -> None:
        self._heads = heads
        self._elementwise = loader.elementwise
        hidden_size = loader.config.hidden_size
        self._query_parts = [heads.qk_nope_head_dim, heads.qk_rope_head_dim]
        self._cached_parts = [heads.kv_lora_rank, heads.qk_rope_head_dim]
        query_dim = sum(self._query_parts)
        query_size = heads.num_heads * query_dim
        query_order = _rotary_halves_order(heads, query_dim, heads.num_heads)
        if heads.q_lora_rank is None:
            self._q_a_proj = None
            self._q_proj = loader.linear(
                prefix, {"q_proj": query_size}, hidden_size, order=query_order
            )
        else:
            rank = heads.q_lora_rank
            self._q_a_proj = loader.linear(
                prefix, {"q_a_proj": rank}, hidden_size, heads.attention_bias
            )
            self._q_a_norm = loader.norm(f"{prefix}.q_a_layernorm", rank, _LATENT_EPS)
            self._q_proj = loader.linear(prefix, {"q_b_proj": query_size}, rank, order=query_order)
        self._kv_a_proj = loader.linear(
            prefix,
            {"kv_a_proj_with_mqa": heads.cached_head_dim},
            hidden_size,
            heads.attention_bias,
            order=_rotary_halves_order(heads, heads.cached_head_dim, 1),
        )
        self._kv_a_norm = loader.norm(f"{prefix}.kv_a_layernorm", heads.kv_lora_rank, _LATENT_EPS)
        w_uk, w_uv = self._load_kv_b_proj(loader, prefix)
        self._w_uk, self._w_uv = w_uk, w_uv
        self._to_latents = loader.linears.make_headwise(w_uk)
        self._to_values = loader.linears.make_headwise(w_uv)
        value_size = heads.num_heads * heads.v_head_dim
        self._output = loader.output(prefix, "o_proj", value_size, heads.attention_bias, norm)

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        attention: StepAttention,
        rotation: Rotation,
    ) -> Hidden:
        """Write `layer` of the pool; return ``residual`` and the attention of `x`."""
        unrotated, rotary = torch.split(self._make_queries(x), self._query_parts, dim=2)
        latent, shared_key = torch.split(self._kv_a_proj(x), self._cached_parts, dim=1)
        latent = self._kv_a_norm(latent.contiguous())
        turned = torch.cat((rotary, shared_key[:, None]), dim=1)
        self._elementwise.rotate(turned, self._heads.num_heads + 1, rotation)
        tokens = LatentTokens(unrotated, turned, latent)
        if isinstance(attention, SplitLatents):
            values = self._attend_split(tokens, layer, attention)
        else:
            values = self._attend_absorbed(tokens, layer, attention)
        return self._output.add_to(residual, values.flatten(1))

    def _attend_absorbed(
        self, tokens: LatentTokens, layer: int, attention: StepAttention
    ) -> torch.Tensor:
        """``[T, num_heads, v_head_dim]``, over latents."""
        heads, count = self._heads, len(tokens.latent)
        rows = tokens.latent.new_empty(count, heads.num_heads + 1, heads.cached_head_dim)
        latents, turning = torch.split(rows, self._cached_parts, dim=2)
        latents[:, :-1] = self._to_latents(tokens.unrotated)
        latents[:, -1] = tokens.latent
        turning.copy_(tokens.turned)
        sums = attention.attend(layer, rows).view(count, heads.num_heads, heads.kv_lora_rank)
        return self._to_values(sums)

    def _attend_split(
        self, tokens: LatentTokens, layer: int, attention: SplitLatents
    ) -> torch.Tensor:
        """``[T, num_heads, v_head_dim]``; some sequences by keys and values of latents."""
        heads, count = self._heads, len(tokens.latent)
        values = tokens.latent.new_empty(count, heads.num_heads, heads.v_head_dim)
        rows = attention.expanded_rows
        values[rows] = self._attend_expanded(tokens.take(rows), layer, attention.expanded)
        if attention.absorbed is not None:
            rows = attention.absorbed_rows
            values[rows] = self._attend_absorbed(tokens.take(rows), layer, attention.absorbed)
        return values

    def _attend_expanded(
        self, tokens: LatentTokens, layer: int, attention: ExpandedStep
    ) -> torch.Tensor:
        """``[T, num_heads, v_head_dim]``, over keys and values of all that these tokens see."""
        heads = self._heads
        new = torch.cat((tokens.latent, tokens.turned[:, -1]), dim=1)[:, None]
        gathered = attention.write_and_gather(layer, new)
        latents, rotary = torch.split(gathered, self._cached_parts, dim=1)
        unrotated = functional.linear(latents, self._w_uk.flatten(0, 1))
        keys = torch.cat(
            (
                unrotated.view(len(latents), heads.num_heads, -1),
                rotary[:, None].expand(-1, heads.num_heads, -1),
            ),
            dim=2,
        )
        values = (latents @ self._w_uv).transpose(0, 1).contiguous()
        queries = torch.cat((tokens.unrotated, tokens.turned[:, :-1]), dim=2)
        return attention.attend(queries, keys, values)

    def _make_queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, num_heads, qk_nope_head_dim + qk_rope_head_dim]``"""
        if self._q_a_proj is not None:
            x = self._q_a_norm(self._q_a_proj(x))
        return self._q_proj(x).view(len(x), self._heads.num_heads, -1)

    def _load_kv_b_proj(
        self, loader: WeightLoader, prefix: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`W_UK` and `W_UV` of the paper.

        `W_UK`, ``[num_heads, qk_nope_head_dim, kv_lora_rank]``, makes keys of latents. `W_UV`,
        ``[num_heads, kv_lora_rank, v_head_dim]``, makes values of them.
        """
        heads = self._heads
        parts = [heads.qk_nope_head_dim, heads.v_head_dim]
        shape = (heads.num_heads * sum(parts), heads.kv_lora_rank)
        both = loader.weight(f"{prefix}.kv_b_proj", shape)
        key, value = torch.split(both.view(heads.num_heads, sum(parts), -1), parts, dim=1)
        return key.contiguous(), value.transpose(1, 2).contiguous()


def make_self_attention(loader: WeightLoader, prefix: str, norm: str) -> SelfAttention:
    """The attention `prefix` of the checkpoint; `norm` is that of `WeightLoader.output`."""
    heads = loader.config.attention
    if isinstance(heads, MLAConfig):
        return MultiHeadLatentAttention(loader, heads, prefix, norm)
    return GroupedQueryAttention(loader, heads, prefix, norm)


def _rotary_halves_order(heads: MLAConfig, dim: int, count: int) -> Int64Array | None:
    """The order of `count` heads of `dim` outputs, as `WeightLoader.linear` takes it.

    A head's last dimensions rotate. They are ordered so that halves turn with each other, as in
    `Elementwise.rotate`. Products of queries and keys stay the same.
    """
    if not heads.rope_interleave:
        return None
    head = np.arange(dim)
    unrotated, rotary = head[: -heads.qk_rope_head_dim], head[-heads.qk_rope_head_dim :]
    order = np.concatenate((unrotated, rotary[0::2], rotary[1::2]))
    return np.concatenate([order + index * dim for index in range(count)])
