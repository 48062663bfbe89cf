"""Attention on a CPU by compiled kernels: one for a few new tokens of a sequence, one for many."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array, new_token_slots
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.kernels.arrays import Array, as_array
from kvrelay.model_runner.kernels.decode_attention import attend_rows
from kvrelay.model_runner.kernels.jit import has_float16
from kvrelay.model_runner.kernels.lanes import ROWS, has_bfloat16_products
from kvrelay.model_runner.kernels.pair_decode_attention import attend_rows_in_pairs
from kvrelay.model_runner.kernels.pair_lanes import DIMENSIONS
from kvrelay.model_runner.kernels.prefill_attention import TILES, attend_strips
from kvrelay.model_runner.kernels.write_kv import write_kv

_SHARED_TOKENS = 1024
"""Attended to in a step: from so many a second thread saves more than its start costs."""
_FEW_TOKENS = 16
"""Up to so many new tokens, such as drafts to be verified, a sequence is computed token by token,
each as in decode: tiles of more would be empty for the most part."""
_FEW_LATENTS = 3
"""The same for latents: all heads share one, so tiles are full sooner."""
_STRIPS_A_THREAD = 4
"""At least, times heads, as far as there are tiles: the last ones end at about the same time."""
SHARED_PRODUCTS = 1 << 25
"""Products of numbers in a chunk's scores from which a second thread saves more than its start
costs, also when cores are busy: about 0.4 ms."""
_ANY_NUMBER = np.iinfo(np.int32).max
"""Of new tokens."""
_NO_WINDOW = np.iinfo(np.int32).max
"""A window longer than any sequence."""


class CpuAttention:
    """The `AttentionBackend` of what kernels can read on a CPU; as many threads as torch has.

    Args:
        pool: of keys and values.
        heads: how to weigh.
        by_token: compute every token as in decode, however many are new: then a token's result
            does not depend on the chunk that it is computed in.
    """

    def __init__(self, pool: KVPool, heads: QueryHeads, by_token: bool = False) -> None:
        self.pool = pool
        self.heads = heads
        self.pages = as_array(pool.data.view(-1))
        geometry = pool.geometry
        self.window = geometry.window or _NO_WINDOW
        few_tokens = _FEW_LATENTS if geometry.latent else _FEW_TOKENS
        self.few_tokens = _ANY_NUMBER if by_token else few_tokens
        paired = pool.data.dtype is torch.bfloat16 and geometry.head_dim % 2 == 0
        unit = np.uint32 if paired and has_bfloat16_products() else np.float32
        self.unit = np.empty(0, unit)
        dims = (geometry.head_dim, heads.value_dim)
        in_pairs = unit is np.uint32 and all(dim % DIMENSIONS == 0 for dim in dims)
        self.attend_rows = attend_rows_in_pairs if in_pairs else attend_rows
        self.threads = torch.get_num_threads()

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there are kernels for pools of this dtype on this device."""
        known = dtype in (torch.bfloat16, torch.float32) or (
            dtype is torch.float16 and has_float16()
        )
        return device.type == "cpu" and known

    @staticmethod
    def is_invariant(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there are, and products of this dtype were found to be batch invariant."""
        return CpuAttention.runs(device, dtype) and dtype is not torch.float16

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> CpuStepAttention:
        """Sort the sequences of `batch` by their new tokens: few as in decode, others in tiles."""
        return CpuStepAttention(self, batch, page_table)


class CpuStepAttention:
    """The `StepAttention` of `CpuAttention`."""

    def __init__(self, backend: CpuAttention, batch: ForwardBatch, page_table: Int32Array) -> None:
        self._backend = backend
        self._page_ids, self._slots = new_token_slots(
            batch, page_table, backend.pool.geometry.page_size
        )
        new_tokens = np.diff(batch.query_start)
        few = new_tokens <= backend.few_tokens
        owners = np.repeat(np.arange(len(new_tokens)), new_tokens)
        rows = np.flatnonzero(few[owners])
        # The longest first: the threads, which take them in turn, end at about the same time.
        rows = rows[np.argsort(-batch.positions[rows], kind="stable")]
        self._rows = rows.astype(np.int32)
        self._page_table = np.ascontiguousarray(page_table[owners[rows]])
        # What a row attends to: its sequence, up to its own token.
        self._seq_lens = (batch.positions[rows] + 1).astype(np.int32)
        seen = int(np.minimum(self._seq_lens, backend.window).sum())
        # Threads take whole rows: more than there are rows would only be started.
        most_threads = backend.threads if seen >= _SHARED_TOKENS else 1
        self._decode_threads = min(most_threads, len(rows))
        self._tables = np.ascontiguousarray(page_table[~few])
        self._strips = self._cut_strips(batch, np.flatnonzero(~few))

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        backend, heads = self._backend, self._backend.heads
        assert rows.dtype is backend.pool.data.dtype, f"{rows.dtype} for {backend.pool.data.dtype}"
        pages = backend.pool.layer(layer)
        page_size = backend.pool.geometry.page_size
        place = (backend.pages, int(pages.storage_offset()), pages.stride(0), page_size)
        new = as_array(rows)
        write_kv(*place, new, heads.num_heads, self._page_ids, self._slots)
        out = rows.new_empty(len(rows), heads.num_heads * heads.value_dim)
        if len(self._rows):
            self._decode(place, new, as_array(out))
        if len(self._strips):
            self._prefill(place, new, as_array(out))
        return out

    def _decode(self, place: tuple[Array, int, int, int], new: Array, out: Array) -> None:
        backend, heads, geometry = self._backend, self._backend.heads, self._backend.pool.geometry
        backend.attend_rows(
            self._decode_threads,
            *place,
            geometry.num_kv_heads,
            geometry.parts,
            backend.window,
            heads.scale,
            heads.softcap or 0.0,
            new,
            heads.num_heads,
            self._rows,
            self._page_table,
            self._seq_lens,
            out,
        )

    def _prefill(self, place: tuple[Array, int, int, int], new: Array, out: Array) -> None:
        backend, heads, geometry = self._backend, self._backend.heads, self._backend.pool.geometry
        attend_strips(
            self._prefill_threads,
            *place,
            geometry.num_kv_heads,
            geometry.parts,
            backend.window,
            heads.scale,
            heads.softcap or 0.0,
            new,
            heads.num_heads,
            self._tables,
            self._strips,
            backend.unit,
            out,
        )

    def _threads_for(self, rows: Int64Array, batch: ForwardBatch, sequences: Int64Array) -> int:
        """How many threads the chunks of `sequences` are worth, which have so many `rows`."""
        backend = self._backend
        seen = np.minimum(batch.seq_lens[sequences], backend.window)
        products = int(np.sum(rows * seen)) * backend.pool.geometry.head_dim
        return backend.threads if products >= SHARED_PRODUCTS else 1

    def _cut_strips(self, batch: ForwardBatch, sequences: Int64Array) -> Int32Array:
        """The chunks of `sequences` in strips ``[n, 5]`` of `attend_strips`, the longest first."""
        kv_heads = self._backend.pool.geometry.num_kv_heads
        group = self._backend.heads.num_heads // kv_heads
        starts, ends = batch.query_start[sequences], batch.query_start[sequences + 1]
        positions = batch.positions[starts]
        rows = (ends - starts).astype(np.int64) * group
        threads = self._prefill_threads = self._threads_for(rows * kv_heads, batch, sequences)
        tiles = int(np.sum(-(-rows // ROWS))) * kv_heads
        most = TILES if threads == 1 else tiles // (threads * _STRIPS_A_THREAD)
        length = ROWS * min(max(most, 1), TILES)
        strips = [
            (sequence, start, position, first, min(length, count - first))
            for sequence, (start, position, count) in enumerate(
                zip(starts, positions, rows, strict=True)
            )
            for first in range(0, count, length)
        ]
        strips.sort(key=lambda strip: -(strip[2] * group + strip[3]))
        return np.array(strips, np.int32).reshape(-1, 5)
