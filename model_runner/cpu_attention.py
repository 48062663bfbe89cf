"""Attention on a CPU: decode rows by a compiled kernel on the pages in place, the rest by torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.cpu_kernels import Array, write_kv
from kvrelay.model_runner.decode_kernel import make_decode_kernel
from kvrelay.model_runner.torch_attention import SequenceSpan

_SPLIT_TOKENS = 1024
"""Tokens attended to in a step from which a second thread saves more than its hand-over costs."""


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a CPU tensor for a kernel: bfloat16 as its bits, float32 as itself."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


class CpuAttention:
    """See `AttentionBackend`. Uses as many threads as torch does."""

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.pages = as_array(pool.data.view(-1))
        geometry = pool.geometry
        self.decode = make_decode_kernel(
            geometry.num_kv_heads, num_heads // geometry.num_kv_heads, geometry.head_dim
        )
        self.threads = torch.get_num_threads()
        self.helpers = ThreadPoolExecutor(max(1, self.threads - 1), "attention")

    @staticmethod
    def supports(pool: KVPool) -> bool:
        """Whether there are kernels for the pool's device and dtype."""
        return pool.data.device.type == "cpu" and pool.data.dtype in (
            torch.bfloat16,
            torch.float32,
        )

    def plan(self, batch: ForwardBatch) -> CpuStepAttention:
        """See `AttentionBackend`."""
        return CpuStepAttention(self, batch)


class CpuStepAttention:
    """See `StepAttention`."""

    def __init__(self, backend: CpuAttention, batch: ForwardBatch) -> None:
        self._backend = backend
        page_size = backend.pool.geometry.page_size
        new_tokens = np.diff(batch.query_start)
        owners = np.repeat(np.arange(len(new_tokens)), new_tokens)
        self._page_ids = batch.page_tables[owners, batch.positions // page_size]
        self._slots = batch.positions % page_size
        decode = np.flatnonzero(new_tokens == 1)
        self._rows = batch.query_start[decode]
        self._page_tables = np.ascontiguousarray(batch.page_tables[decode])
        self._seq_lens = batch.seq_lens[decode]
        self._shares = self._split()
        self._spans = [
            SequenceSpan.of(batch, int(i), backend.pool) for i in np.flatnonzero(new_tokens > 1)
        ]

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `StepAttention`."""
        backend = self._backend
        pages = backend.pool.layer(layer)
        page_size = backend.pool.geometry.page_size
        place = (backend.pages, int(pages.storage_offset()), pages.stride(0), page_size)
        rows = as_array(qkv)
        write_kv(*place, rows, backend.num_heads, self._page_ids, self._slots)
        out = qkv.new_empty(len(qkv), backend.num_heads * qkv.shape[2])
        if self._shares:
            self._decode(place, rows, as_array(out))
        for span in self._spans:
            attended = span.attend(pages, qkv[:, : backend.num_heads])
            out[span.start : span.end].view(attended.shape).copy_(attended)
        return out

    def _decode(self, place: tuple[Array, int, int, int], qkv: Array, out: Array) -> None:
        def attend(share: slice) -> None:
            self._backend.decode(
                *place,
                qkv,
                self._rows[share],
                self._page_tables[share],
                self._seq_lens[share],
                out,
            )

        helped = [self._backend.helpers.submit(attend, share) for share in self._shares[1:]]
        attend(self._shares[0])
        for future in helped:
            future.result()

    def _split(self) -> list[slice]:
        """The decode rows, cut where the tokens they attend to are about equal."""
        count, totals = len(self._rows), np.cumsum(self._seq_lens)
        if count == 0:
            return []
        shares = min(self._backend.threads, count)
        if totals[-1] < _SPLIT_TOKENS or shares == 1:
            return [slice(0, count)]
        marks = totals[-1] * np.arange(1, shares) / shares
        cuts = [0, *(int(cut) for cut in np.searchsorted(totals, marks)), count]
        return [slice(a, b) for a, b in pairwise(cuts) if a < b]
