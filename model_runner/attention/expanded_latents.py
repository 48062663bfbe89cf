"""Prompts over latents (MLA): keys and values are made for sequences that bring many tokens.

With absorption a query is as wide as a latent, and so is the sum of what it sees. With many queries
that costs more than to make each key and value once: DeepSeek-V2 (arXiv 2405.04434), 2.1.2. This
file chooses those sequences of a step; the others are computed with absorption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInferAttention,
    FlashInferStepAttention,
    Wrapper,
)
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array
from kvrelay.model_runner.config.query_heads import ExpandedHeads
from kvrelay.model_runner.torch_options import pin_to_device

if TYPE_CHECKING:  # the protocol, whose file imports this one
    from kvrelay.model_runner.attention.backend import AttentionBackend

MOST_BYTES: Final = 512 << 20
"""The most bytes of keys and values, and of what they are made by, for one layer of a step."""


def choose_expanded(batch: ForwardBatch, heads: ExpandedHeads, token_bytes: int) -> Int64Array:
    """The sequences of `batch` whose keys and values are made, in ascending order.

    The largest chunks are chosen first, as long as their `token_bytes` a token fit into
    `MOST_BYTES`.
    """
    new = np.diff(batch.query_start)
    many = np.flatnonzero(new >= heads.least_new_tokens)
    order = many[np.argsort(-new[many], kind="stable")]
    fits = np.cumsum(batch.seq_lens[order].astype(np.int64)) * token_bytes <= MOST_BYTES
    return np.sort(order[fits])


def expanded_token_bytes(heads: ExpandedHeads, num_heads: int, dtype: torch.dtype) -> int:
    """The most bytes that are made for each token that a sequence sees, for one layer."""
    # A key, its part that does not rotate, and a value before and after its heads come first.
    return num_heads * 2 * (heads.key_dim + heads.value_dim) * dtype.itemsize


def most_expanded_tokens(heads: ExpandedHeads, num_heads: int, dtype: torch.dtype) -> int:
    """The most tokens of a step whose keys and values are made."""
    return MOST_BYTES // expanded_token_bytes(heads, num_heads, dtype)


def take_sequences(
    batch: ForwardBatch, page_table: Int32Array, chosen: Int64Array
) -> tuple[ForwardBatch, Int32Array, Int64Array]:
    """The sequences `chosen` of a batch: as a batch, with their table and their rows of `batch`."""
    starts, ends = batch.query_start[chosen], batch.query_start[chosen + 1]
    rows = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    table = page_table[chosen]
    part = replace(
        batch,
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        query_start=np.concatenate(([0], np.cumsum(ends - starts))).astype(np.int32),
        seq_lens=batch.seq_lens[chosen],
        page_tables=(table,),
        logit_rows=np.empty(0, np.int64),
    )
    return part, table, rows.astype(np.int64)


def token_places(
    batch: ForwardBatch, page_table: Int32Array, geometry: KVGeometry
) -> tuple[Int64Array, Int64Array]:
    """The places of all tokens, sequence after sequence: pages and slots, ``[S]`` each."""
    owners = np.repeat(np.arange(len(batch.seq_lens)), batch.seq_lens)
    starts = np.concatenate(([0], np.cumsum(batch.seq_lens)))[:-1]
    positions = np.arange(len(owners)) - starts[owners]
    pages = page_table[owners, positions // geometry.page_size]
    return pages.astype(np.int64), positions % geometry.page_size


class ExpandedStep:
    """The sequences of a step over one pool whose keys and values are made of latents."""

    def __init__(
        self,
        backend: FlashInferAttention,
        heads: ExpandedHeads,
        wrapper: Wrapper,
        batch: ForwardBatch,
        page_table: Int32Array,
    ) -> None:
        geometry, device = backend.pool.geometry, backend.pool.data.device
        assert geometry.window is None
        self._pool = backend.pool
        self._fp8 = backend.fp8
        self._wrapper = wrapper
        self._new_tokens = backend.locate(batch, page_table)
        self._pages, self._slots = (
            pin_to_device(one, device) for one in token_places(batch, page_table, geometry)
        )
        to_host = backend.flashinfer.to_host
        ends = np.concatenate(([0], np.cumsum(batch.seq_lens))).astype(np.int32)
        wrapper.plan(
            to_host(np.ascontiguousarray(batch.query_start, np.int32)),
            to_host(ends),
            num_qo_heads=backend.heads.num_heads,
            num_kv_heads=backend.heads.num_heads,
            head_dim_qk=heads.key_dim,
            head_dim_vo=heads.value_dim,
            causal=True,
            sm_scale=backend.heads.scale,
            q_data_type=backend.dtype,
            kv_data_type=backend.dtype,
        )

    def write_and_gather(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """Write ``new [E, 1, D]``; return all latents that these sequences see, ``[S, D]``."""
        pages = self._pool.layer(layer)
        if self._fp8 is None:
            self._new_tokens.write(pages, new)
            return pages[:, 0, 0][self._pages, self._slots]
        self._new_tokens.write(pages, self._fp8.quantize(layer, new))
        # Not every device can index float8.
        stored = pages.view(torch.uint8)[:, 0, 0][self._pages, self._slots]
        return self._fp8.dequantize(layer, stored.view(pages.dtype))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend with ``[E, heads, key_dim]`` over ``[S, heads, ...]``.

        Returns:
            ``[E, heads, value_dim]``
        """
        attended: torch.Tensor = self._wrapper.run(queries, keys, values)
        return attended


@dataclass(frozen=True, slots=True)
class SplitLatents:
    """A step over latents: some sequences by keys and values, the others by absorption."""

    expanded: ExpandedStep
    expanded_rows: torch.Tensor
    """``[E]`` indices of the step's tokens."""
    absorbed: FlashInferStepAttention | None
    """The sequences that are computed by absorption; None: there are none."""
    absorbed_rows: torch.Tensor
    """``[T - E]``"""

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: a layer of latents uses the parts instead."""
        raise AssertionError("a step in parts")


class SplittingAttention:
    """The `AttentionBackend` of latents on CUDA devices; a plan counts until the next one is made.

    Args:
        absorbing: the backend that absorbs, over the same pool.
        heads: the dimensions of keys and values that are made of latents.
        wrappers: FlashInfer's wrappers for keys and values outside of pages. They are used in turn:
            a step may be planned while the plan before is on its way.
    """

    def __init__(
        self,
        absorbing: FlashInferAttention,
        heads: ExpandedHeads,
        wrappers: tuple[Wrapper, ...],
    ) -> None:
        self.absorbing = absorbing
        self._heads = heads
        self._wrappers = wrappers
        self._turn = 0
        self._token_bytes = expanded_token_bytes(heads, absorbing.heads.num_heads, absorbing.dtype)

    @property
    def least_new_tokens(self) -> int:
        """The fewest new tokens of a sequence whose keys and values are made."""
        return self._heads.least_new_tokens

    def plan(
        self, batch: ForwardBatch, page_table: Int32Array
    ) -> FlashInferStepAttention | SplitLatents:
        """Plan the kernels of `batch`; see `AttentionBackend`."""
        chosen = choose_expanded(batch, self._heads, self._token_bytes)
        if not len(chosen):
            return self.absorbing.plan(batch, page_table)
        part, table, rows = take_sequences(batch, page_table, chosen)
        self._turn = (self._turn + 1) % len(self._wrappers)
        wrapper = self._wrappers[self._turn]
        expanded = ExpandedStep(self.absorbing, self._heads, wrapper, part, table)
        others = np.setdiff1d(np.arange(len(batch.seq_lens)), chosen)
        absorbed, other_rows = None, np.empty(0, np.int64)
        if len(others):
            part, table, other_rows = take_sequences(batch, page_table, others)
            absorbed = self.absorbing.plan(part, table)
        return SplitLatents(expanded, self._on_device(rows), absorbed, self._on_device(other_rows))

    def _on_device(self, rows: Int64Array) -> torch.Tensor:
        return pin_to_device(rows, self.absorbing.pool.data.device)


def absorbing(backend: AttentionBackend) -> FlashInferAttention:
    """The backend that takes any step of decode: FlashInfer's, by absorption for latents."""
    plain = backend.absorbing if isinstance(backend, SplittingAttention) else backend
    assert isinstance(plain, FlashInferAttention)
    return plain
