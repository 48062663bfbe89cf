"""Attention of a step of decode that is launched as a part of a CUDA graph."""

from __future__ import annotations

import torch

from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array


class GraphStep:
    """The `StepAttention` of all steps of `size` sequences, each with one new token.

    Kernels of `attend` read the arrays that the latest `fill` has left on the device.
    """

    def __init__(self, backend: FlashInferAttention, size: int) -> None:
        self._backend = backend
        geometry = backend.pool.geometry
        buffers, self._wrapper = backend.flashinfer.graph_parts(geometry, size)
        self._new_tokens = backend.static_tokens(buffers.new_pages[:size], buffers.new_slots[:size])

    def fill(self, batch: ForwardBatch, page_table: Int32Array) -> None:
        """Plan for `batch`, and set the places of its new tokens. Not to be captured."""
        geometry = self._backend.pool.geometry
        self._new_tokens.fill(batch, page_table, geometry.page_size)
        self._backend.plan_decode(self._wrapper, *self._backend.lay_out(batch, page_table))

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        return self._backend.attend(self._wrapper, self._new_tokens, layer, rows)
