"""Attention on a CPU by compiled kernels: one for a few new tokens of a sequence, one for many."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from kvrelay.cpu_kernels.arrays import Array, address, as_array
from kvrelay.cpu_kernels.attention.decode_attention import attend_rows
from kvrelay.cpu_kernels.attention.pair_decode_attention import attend_rows_in_pairs
from kvrelay.cpu_kernels.attention.pair_lanes import DIMENSIONS
from kvrelay.cpu_kernels.attention.prefill_attention import attend_strips
from kvrelay.cpu_kernels.attention.prefill_lanes import VECTORS
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.processor import has_bfloat16_products, has_float16
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, may_use_tiles
from kvrelay.cpu_kernels.write_kv import write_kv
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array, new_token_slots
from kvrelay.model_runner.config.query_heads import QueryHeads

_SHARED_TOKENS = 1024
"""The fewest tokens that a step attends to for which a second thread is worth its start."""
_FEW_ROWS = 12
"""The most rows of query heads with shared keys and values that are computed as in decode.

New tokens are then computed one by one: most lanes of a tile would be empty.
"""
_MOST_DRAFTS = 16
"""The most tokens, if the logits of all are asked for, that are computed as in decode.

So drafts are verified by what plain decoding would compute, to the last bit.
"""
_FEW_LATENTS = 3
"""The same for latents, which all heads share, in tokens."""
TILES = 4
"""The most tiles of a strip: a block of its sequence is copied from pages once for all of them."""
_STRIPS_A_THREAD = 4
"""The fewest strips a thread, times heads, as far as there are tiles.

So the last strips end at about the same time.
"""
SHARED_PRODUCTS = 1 << 25
"""The fewest products of numbers in a chunk's scores for which a second thread is worth its start.

A start takes about 0.4 ms, also when cores are busy.
"""
_ANY_NUMBER = np.iinfo(np.int32).max
"""A number of new tokens that no sequence reaches."""
_NO_WINDOW = np.iinfo(np.int32).max
"""A window longer than any sequence."""


Place: TypeAlias = tuple[Array, int, int, int]
"""A pool's memory, with the offset of a layer's pages, the stride of pages, and a page's tokens."""
New: TypeAlias = tuple[int, tuple[int, int, int], int]
"""The address of a layer's new heads, their shape ``[T, heads, D]``, and the heads of queries."""


class CpuAttention:
    """The `AttentionBackend` of pools that kernels can read on a CPU.

    Args:
        pool: the pool of keys and values.
        heads: the query heads, with scale and softcap.
        by_token: compute every token as in decode, however many are new. A token's result then does
            not depend on its chunk.
        threads: the threads that share large steps; None: as many as torch has now.
    """

    def __init__(
        self,
        pool: KVPool,
        heads: QueryHeads,
        by_token: bool = False,
        threads: KernelThreads | None = None,
    ) -> None:
        self.pool = pool
        self.heads = heads
        geometry = pool.geometry
        pages, layers = as_array(pool.data.view(-1)), map(pool.layer, range(geometry.num_layers))
        self.places: list[Place] = [
            (pages, int(one.storage_offset()), one.stride(0), geometry.page_size) for one in layers
        ]
        """The place of each layer."""
        self.window = geometry.window or _NO_WINDOW
        group = heads.num_heads // geometry.num_kv_heads
        few_tokens = _FEW_LATENTS if geometry.latent else max(_FEW_ROWS // group, 1)
        self.few_tokens = _ANY_NUMBER if by_token else few_tokens
        self.most_drafts = _FEW_LATENTS if geometry.latent else _MOST_DRAFTS
        self.dtype = pool.data.dtype
        all_heads = heads.num_heads + geometry.parts * geometry.num_kv_heads
        self.token_shape = (all_heads, geometry.head_dim)
        """The shape of a token's new heads in one layer."""
        paired = self.dtype is torch.bfloat16 and geometry.head_dim % 2 == 0
        unit = np.uint32 if paired and has_bfloat16_products() else np.float32
        self.unit = np.empty(0, unit)
        dims = (geometry.head_dim, heads.value_dim)
        whole_tiles = all(dim % TILE_NUMBERS == 0 for dim in dims)
        self.in_tiles = unit is np.uint32 and whole_tiles and may_use_tiles()
        """Whether prompts are computed by the processor's tiles."""
        in_pairs = unit is np.uint32 and all(dim % DIMENSIONS == 0 for dim in dims)
        self.attend_rows = attend_rows_in_pairs if in_pairs else attend_rows
        self.threads = threads or KernelThreads()

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there are kernels for pools of this dtype on this device."""
        known = dtype in (torch.bfloat16, torch.float32) or (
            dtype is torch.float16 and has_float16()
        )
        return device.type == "cpu" and known

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> CpuStepAttention:
        """Sort the sequences of `batch`: few new tokens run as in decode, many in tiles."""
        return CpuStepAttention(self, batch, page_table)


class CpuStepAttention:
    """The `StepAttention` of `CpuAttention`."""

    def __init__(self, backend: CpuAttention, batch: ForwardBatch, page_table: Int32Array) -> None:
        self._backend = backend
        self._page_ids, self._slots = new_token_slots(
            batch, page_table, backend.pool.geometry.page_size
        )
        new_tokens = np.diff(batch.query_start)
        num_logits = np.diff(np.searchsorted(np.unique(batch.logit_rows), batch.query_start))
        drafted = (num_logits >= new_tokens) & (new_tokens <= backend.most_drafts)
        few = drafted | (new_tokens <= backend.few_tokens)
        owners = np.repeat(np.arange(len(new_tokens)), new_tokens)
        rows = np.flatnonzero(few[owners])
        # The longest first: the threads, which take them in turn, end at about the same time.
        rows = rows[np.argsort(-batch.positions[rows], kind="stable")]
        self._rows = rows.astype(np.int32)
        self._page_table = np.ascontiguousarray(page_table[owners[rows]])
        # A row attends to its sequence, up to its own token.
        self._seq_lens = (batch.positions[rows] + 1).astype(np.int32)
        seen = int(np.minimum(self._seq_lens, backend.window).sum())
        # Threads take whole rows: more than there are rows would only be started.
        self._most_decode_threads = len(rows) if seen >= _SHARED_TOKENS else 1
        self._tables = np.ascontiguousarray(page_table[~few])
        self.strips = self._cut_strips(batch, np.flatnonzero(~few))

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        backend, heads = self._backend, self._backend.heads
        tokens, all_heads, head_dim = rows.shape
        assert (all_heads, head_dim) == backend.token_shape
        assert tokens == len(self._slots)
        place, shape = backend.places[layer], (tokens, all_heads, head_dim)
        new: New = (address(rows, backend.dtype), shape, heads.num_heads)
        write_kv(*place, *new, self._page_ids, self._slots)
        out = rows.new_empty(tokens, heads.num_heads * heads.value_dim)
        at_sinks = 0
        if sinks is not None:
            assert sinks.shape == (heads.num_heads,)
            at_sinks = address(sinks, torch.float32)
        if self._rows.size:
            self._decode(place, at_sinks, new, out.data_ptr())
        if self.strips.size:
            self._prefill(place, at_sinks, new, out.data_ptr())
        return out

    def _decode(self, place: Place, sinks: int, new: New, out: int) -> None:
        backend, heads, geometry = self._backend, self._backend.heads, self._backend.pool.geometry
        backend.attend_rows(
            self.decode_threads,
            *place,
            geometry.num_kv_heads,
            geometry.parts,
            backend.window,
            heads.scale,
            heads.softcap or 0.0,
            sinks,
            *new,
            heads.value_dim,
            self._rows,
            self._page_table,
            self._seq_lens,
            out,
        )

    def _prefill(self, place: Place, sinks: int, new: New, out: int) -> None:
        backend, heads, geometry = self._backend, self._backend.heads, self._backend.pool.geometry
        attend_strips(
            self._backend.threads.count if self._shares_strips else 1,
            *place,
            geometry.num_kv_heads,
            geometry.parts,
            backend.window,
            heads.scale,
            heads.softcap or 0.0,
            sinks,
            *new,
            heads.value_dim,
            self._tables,
            self.strips,
            backend.unit,
            backend.in_tiles,
            out,
        )

    @property
    def decode_threads(self) -> int:
        """The threads that share the rows that are computed as in decode."""
        return min(self._backend.threads.count, self._most_decode_threads)

    def _is_shared(self, rows: Int64Array, batch: ForwardBatch, sequences: Int64Array) -> bool:
        """Whether threads share the chunks of `sequences`, which have this many `rows` each."""
        backend = self._backend
        seen = np.minimum(batch.seq_lens[sequences], backend.window)
        products = int(np.sum(rows * seen)) * backend.pool.geometry.head_dim
        return products >= SHARED_PRODUCTS

    def _cut_strips(self, batch: ForwardBatch, sequences: Int64Array) -> Int32Array:
        """The chunks of `sequences` in strips ``[n, 5]`` of `attend_strips`, the longest first."""
        kv_heads = self._backend.pool.geometry.num_kv_heads
        group = self._backend.heads.num_heads // kv_heads
        starts, ends = batch.query_start[sequences], batch.query_start[sequences + 1]
        positions = batch.positions[starts]
        rows = (ends - starts).astype(np.int64) * group
        self._shares_strips = self._is_shared(rows * kv_heads, batch, sequences)
        threads = self._backend.threads.count if self._shares_strips else 1
        vectors = -(-rows // LANES)
        tiles = int(np.sum(-(-vectors // VECTORS))) * kv_heads
        most = TILES if threads == 1 else tiles // (threads * _STRIPS_A_THREAD)
        length = VECTORS * min(max(most, 1), TILES)
        strips = [
            (sequence, start, position, LANES * begin, min(LANES * end, count) - LANES * begin)
            for sequence, (start, position, count, parts) in enumerate(
                zip(starts, positions, rows.tolist(), vectors.tolist(), strict=True)
            )
            for begin, end in pairwise(cut_evenly(parts, length))
        ]
        strips.sort(key=lambda strip: -(strip[2] * group + strip[3]))
        return np.array(strips, np.int32).reshape(-1, 5)


def cut_evenly(count: int, most: int) -> list[int]:
    """The bounds of the fewest pieces of `count` things, at most `most` each."""
    pieces = -(-count // most)
    return [count * piece // pieces for piece in range(pieces + 1)]
