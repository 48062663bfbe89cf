"""Attention of transformers' models over pages: by our kernels, or gathered in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.backend import (
    AttentionBackend,
    AttentionFactory,
    StepAttention,
)
from kvrelay.model_runner.attention.expanded_latents import token_places
from kvrelay.model_runner.attention.new_tokens import NewTokens
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.torch_options import pin_to_device
from kvrelay.model_runner.transformers_model.attention_interface import Scoring
from kvrelay.model_runner.transformers_model.described_mask import DescribedMask
from kvrelay.model_runner.transformers_model.layout import AttentionCall, Layout

_SCORE_BYTES: Final = 128 << 20
"""The most bytes of a block's scores in float32; a few times as much is taken at once."""


class LayoutAttention:
    """The factory of one model's attention, over the pools of its layout.

    Args:
        choice: what the user asks for.
        layout: the model's.
        geometries: one for each of its pools.
        dtype: the dtype that the model computes in.
        device: the pools' device.
        splits: how FlashInfer divides a sequence's KV.
        threads: the threads of our kernels.

    Raises:
        UnsupportedOptionError: the chosen backend cannot compute this model here.
    """

    has_graphs = False
    most_expanded_tokens = 0

    def __init__(
        self,
        choice: AttentionChoice,
        layout: Layout,
        geometries: Sequence[KVGeometry],
        dtype: torch.dtype,
        device: torch.device,
        splits: AttentionSplits = AttentionSplits.BATCH,
        threads: KernelThreads | None = None,
    ) -> None:
        self._factories: dict[QueryHeads, AttentionFactory] = {}
        self._pools: list[list[QueryHeads]] = [[] for _ in geometries]
        kernels = [] if layout.latents else [one for one in layout.calls if one.in_kernels]
        for heads in dict.fromkeys(call.heads for call in kernels):
            pools = sorted({call.pool for call in kernels if call.heads == heads})
            self._factories[heads] = AttentionFactory(
                choice,
                [geometries[pool] for pool in pools],
                dtype,
                heads,
                device,
                splits=splits,
                threads=threads,
            )
            for pool in pools:
                self._pools[pool].append(heads)
        chosen = {factory.choice for factory in self._factories.values()}
        self.choice = chosen.pop() if len(chosen) == 1 else AttentionChoice.TORCH
        """What computes attention, if all of it is computed alike."""

    @property
    def flashinfer_package(self) -> object | None:
        """The flashinfer package, if it computes attention."""
        packages = (factory.flashinfer_package for factory in self._factories.values())
        return next(filter(None, packages), None)

    def for_pools(self, geometry: KVGeometry) -> KVGeometry:
        """The geometry that a pool needs for heads of `geometry`."""
        for factory in self._factories.values():
            geometry = factory.for_pools(geometry)
        return geometry

    def scratch_page_bytes(self, geometry: KVGeometry) -> int:
        """No scratch pages are needed beside pools."""
        return 0

    def drop_graphs(self) -> None:
        """Refuse: there are none."""
        raise AssertionError("graphs of another model")

    def make_all(self, pools: Sequence[KVPool]) -> tuple[PoolAttention, ...]:
        """Make the attention over each of the model's pools."""
        return tuple(
            PoolAttention(pool, {one: self._factories[one].make(pool) for one in heads})
            for pool, heads in zip(pools, self._pools, strict=True)
        )


class PoolAttention:
    """Attention over one pool, by a backend for each kind of query heads, or by gathering."""

    def __init__(self, pool: KVPool, backends: Mapping[QueryHeads, AttentionBackend]) -> None:
        self.pool = pool
        self._backends = backends

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> PoolStep:
        """Prepare `batch` with its table for this pool."""
        steps = {heads: one.plan(batch, page_table) for heads, one in self._backends.items()}
        return PoolStep(self.pool, batch, page_table, steps)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a step: its rows of the batch, and the pages from the first that it sees."""

    start: int
    end: int
    positions: torch.Tensor
    """``[S]``: from the first token of its first page to its last one."""
    page_ids: torch.Tensor


class PoolStep:
    """The attention of one forward over one pool."""

    def __init__(
        self,
        pool: KVPool,
        batch: ForwardBatch,
        page_table: Int32Array,
        steps: Mapping[QueryHeads, StepAttention],
    ) -> None:
        self._pool = pool
        self._batch = batch
        self._page_table = page_table
        self._steps = steps

    def attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: DescribedMask | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Write keys and values, and attend: shapes as in `Forward.attend`."""
        width = call.heads.value_dim
        tokens, heads = query.shape[2], query.shape[1]
        parts = (_widened(one[0], width).transpose(0, 1) for one in (query, key, value))
        rows = torch.cat(tuple(parts), dim=1)
        if call.in_kernels:
            sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32)
            attended = self._steps[call.heads].attend(call.place, rows, sinks)
            attended = attended.view(1, tokens, heads, width)
            if call.value_dim == width:
                return attended
            return attended[..., : call.value_dim].contiguous()
        pages = self._pool.layer(call.place)
        new = _widened(rows[:, heads:], pages.shape[-1])
        self._new_tokens.write(pages, new.contiguous())
        outputs = []
        for one in self._sequences:
            gathered = pages[one.page_ids].permute(1, 2, 0, 3, 4).flatten(2, 3)
            gathered = gathered[:, :, : len(one.positions)]
            keys, values = gathered[0, ..., : call.key_dim], gathered[1, ..., : call.value_dim]
            queries = query[0, :, one.start : one.end]
            outputs.append(
                attend_in_blocks(call, queries, keys, values, mask, one.positions, scoring)
            )
        return torch.cat(outputs, dim=1).transpose(0, 1)[None].contiguous()

    def store_latents(self, place: int, new: torch.Tensor) -> torch.Tensor:
        """Write ``new [T, D]``; return all latents of all sequences, end to end: ``[S, D]``."""
        pages = self._pool.layer(place)
        self._new_tokens.write(pages, _widened(new, pages.shape[-1]).contiguous())
        page_ids, slots = self._token_places
        return pages[:, 0, 0][page_ids, slots][:, : new.shape[-1]]

    def attend_expanded(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: DescribedMask | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend to what a model made of latents: ``[1, heads, S, dim]`` of all sequences."""
        batch, first, outputs = self._batch, 0, []
        ends = batch.query_start.tolist()
        for start, end, total in zip(ends, ends[1:], batch.seq_lens.tolist(), strict=False):
            positions = torch.arange(total, device=query.device)
            own = slice(first, first + total)
            queries, own_keys, own_values = (
                query[0, :, start:end],
                keys[0, :, own],
                values[0, :, own],
            )
            outputs.append(
                attend_in_blocks(call, queries, own_keys, own_values, mask, positions, scoring)
            )
            first += total
        return torch.cat(outputs, dim=1).transpose(0, 1)[None].contiguous()

    @cached_property
    def _new_tokens(self) -> NewTokens:
        return NewTokens(self._batch, self._page_table, self._pool)

    @cached_property
    def _token_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page and slot of every token of every sequence."""
        geometry, device = self._pool.geometry, self._pool.data.device
        pages, slots = token_places(self._batch, self._page_table, geometry)
        return pin_to_device(pages, device), pin_to_device(slots, device)

    @cached_property
    def _sequences(self) -> list[_Sequence]:
        geometry, device = self._pool.geometry, self._pool.data.device
        starts = self._batch.query_start.tolist()
        sequences = []
        for index, total in enumerate(self._batch.seq_lens.tolist()):
            start, end = starts[index], starts[index + 1]
            oldest = max(0, total - (end - start) + 1 - geometry.window) if geometry.window else 0
            first_page = oldest // geometry.page_size
            page_ids = self._page_table[index, first_page : geometry.pages_for(total)]
            positions = torch.arange(first_page * geometry.page_size, total, device=device)
            on_device = pin_to_device(page_ids.astype(np.int64), device)
            sequences.append(_Sequence(start, end, positions, on_device))
        return sequences


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros behind, up to `width` numbers a row."""
    more = width - rows.shape[-1]
    return functional.pad(rows, (0, more)) if more else rows


def find_visible(
    call: AttentionCall, mask: DescribedMask | None, new: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """``[new, positions]``: which tokens of a sequence its new ones see."""
    if mask is not None:
        return mask.between(new, positions)
    seen = new[:, None] >= positions[None, :]
    if call.window is not None:
        seen &= new[:, None] - positions[None, :] < call.window
    return seen


def attend_in_blocks(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: DescribedMask | None,
    positions: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend with one sequence's queries, the last of its `positions`, as `attend_one` does.

    Scores of a block of queries take up to `_SCORE_BYTES`, unless one query has more.
    """
    new = positions[len(positions) - query.shape[1] :]
    each = max(1, _SCORE_BYTES // (4 * query.shape[0] * len(positions)))
    blocks = [
        attend_one(part, keys, values, find_visible(call, mask, places, positions), scoring)
        for part, places in zip(
            torch.split(query, each, dim=1), torch.split(new, each), strict=True
        )
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend with one sequence's queries.

    Args:
        query: ``[heads, new, key_dim]``
        keys: ``[kv_heads, total, key_dim]``
        values: ``[kv_heads, total, value_dim]``
        seen: ``[new, total]``
        scoring: how weights are made.

    Returns:
        ``[heads, new, value_dim]``
    """
    if scoring.softcap is None and scoring.sinks is None:
        return functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=scoring.scale,
            enable_gqa=True,
        )[0]
    kv_heads, total = keys.shape[:2]
    grouped = query.reshape(kv_heads, -1, query.shape[-1])
    scores = (grouped @ keys.transpose(1, 2)).view(*query.shape[:2], total) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
        scores = torch.cat((scores, sinks), dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=wide).to(values.dtype)
    return (weights[..., :total].reshape(kv_heads, -1, total) @ values).view(*query.shape[:2], -1)
