"""The interface of attention over paged KV, and the choice of what implements it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.choice import AttentionChoice
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferAttention,
    flashinfer_lacks,
    import_flashinfer,
)
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)


class StepAttention(Protocol):
    """Attention of one forward: its batch, laid out for the backend once for a pool's layers."""

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write this forward's keys and values of `layer` into the pool, and attend.

        Args:
            layer: the pool's layer.
            rows: ``[T, num_heads + parts * num_kv_heads, head_dim]`` contiguous: the
                heads of queries, keys, values (or queries and the latent), in the
                pool's dtype and already rotated.

        Returns:
            ``[T, num_heads * value_dim]`` in the same dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention with grouped heads over the pages of one pool, within its window."""

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> StepAttention:
        """Prepare `batch` with its table for this pool.

        Only the latest plan may be used, and the next one only be made when its kernels have run.
        """
        ...


class AttentionFactory:
    """Makes the backends of one model on one device; what they share is allocated here.

    Args:
        choice: what the user wants.
        geometries: of all pools that the model will have.
        heads: the model's.
        device: of the pools.
        batch_invariant: a token's result must not depend on what is computed beside it:
            `CpuAttention` must be able to run there.

    Raises:
        UnsupportedOptionError: what was chosen cannot compute this model here.
    """

    def __init__(
        self,
        choice: AttentionChoice,
        geometries: Sequence[KVGeometry],
        heads: QueryHeads,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> None:
        self._heads = heads
        self._batch_invariant = batch_invariant
        dtype = geometries[0].dtype
        if choice is AttentionChoice.AUTO:
            choice = _choose(geometries, heads, device)
        if choice is AttentionChoice.CPU and not CpuAttention.runs(device, dtype):
            raise UnsupportedOptionError(
                f"--attention cpu has no kernels for {dtype} on {device.type}"
            )
        if batch_invariant and choice is not AttentionChoice.CPU:
            raise UnsupportedOptionError(f"--batch-invariant is not for --attention {choice}")
        self.choice = choice
        """The backend that computes: not `AUTO`."""
        self._flashinfer = self._load_flashinfer(geometries, device)

    def make(self, pool: KVPool) -> AttentionBackend:
        """The backend of `pool`, which has one of the geometries."""
        match self.choice:
            case AttentionChoice.CPU:
                return CpuAttention(pool, self._heads, by_token=self._batch_invariant)
            case AttentionChoice.FLASHINFER:
                assert self._flashinfer is not None
                return FlashInferAttention(self._flashinfer, pool, self._heads)
            case _:
                return TorchAttention(pool, self._heads)

    def _load_flashinfer(
        self, geometries: Sequence[KVGeometry], device: torch.device
    ) -> FlashInfer | None:
        if self.choice is not AttentionChoice.FLASHINFER:
            return None
        for geometry in geometries:
            if lack := flashinfer_lacks(geometry, self._heads):
                raise UnsupportedOptionError(f"--attention flashinfer has no kernels for {lack}")
        flashinfer = FlashInfer(device)
        for geometry in geometries:
            flashinfer.wrappers(geometry, self._heads)
        return flashinfer


def _choose(
    geometries: Sequence[KVGeometry], heads: QueryHeads, device: torch.device
) -> AttentionChoice:
    """The fastest; on a CUDA device a line in the log says why it is not FlashInfer."""
    if CpuAttention.runs(device, geometries[0].dtype):
        return AttentionChoice.CPU
    if device.type != "cuda":
        return AttentionChoice.TORCH
    lack = next(filter(None, (flashinfer_lacks(one, heads) for one in geometries)), None)
    if lack is None:
        try:
            import_flashinfer(device)
        except UnsupportedOptionError as error:
            lack = str(error)
        else:
            return AttentionChoice.FLASHINFER
    logger.warning("attention is computed in plain torch, which is slow: FlashInfer: %s", lack)
    return AttentionChoice.TORCH
