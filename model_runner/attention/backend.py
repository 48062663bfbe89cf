"""The interface of attention over paged KV, and the choice of the backend that implements it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.dequantized_attention import (
    DequantizedAttention,
    scratch_geometry,
)
from kvrelay.model_runner.attention.expanded_latents import (
    SplittingAttention,
    most_expanded_tokens,
)
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferAttention,
    expands,
    flashinfer_lacks,
    import_flashinfer,
    pad_heads,
)
from kvrelay.model_runner.attention.fp8_pages import FP8, Fp8Pages
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.cuda_graphs import GraphRoom, do_without_graphs
from kvrelay.model_runner.config.kv_scale import KVScale
from kvrelay.model_runner.config.query_heads import ExpandedHeads, QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)


class StepAttention(Protocol):
    """Attention of one forward: its batch, laid out for the backend once for a pool's layers."""

    def attend(
        self, layer: int, rows: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write this forward's keys and values of `layer` into the pool, and attend.

        Args:
            layer: the pool's layer.
            rows: ``[T, num_heads + parts * num_kv_heads, head_dim]`` contiguous, in the model's
                dtype, already rotated. The heads are those of queries, keys, values (or queries and
                the latent). Keys and values may be rounded in place.
            sinks: ``[num_heads]`` float32, scores that are in each head's softmax beside its
                tokens' and weigh no value; None: there are none. Latents have none.

        Returns:
            ``[T, num_heads * value_dim]`` in the same dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Causal attention with grouped heads over the pages of one pool, within its window."""

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> StepAttention:
        """Prepare `batch` with its table for this pool.

        Only the latest plan may be used to launch kernels. The next one may be made while they
        run; the one after it only when they have run.
        """
        ...


class AttentionFactory:
    """The factory of one model's backends on one device; it allocates the memory that they share.

    Args:
        choice: the backend that the user asks for.
        geometries: those of the model's heads, for all of its pools; page sizes matter to graphs
            alone.
        dtype: the dtype that the model computes in.
        heads: the model's query heads.
        device: the pools' device.
        batch_invariant: a token's result must not depend on what is computed beside it;
            `CpuAttention` must be able to run there.
        graph_room: the sizes of CUDA graphs of decode; None: there will be no graphs.
        expanded_heads: the heads of keys and values that may be made of latents; None: none are
            made.
        splits: how FlashInfer divides a sequence's KV.
        threads: the threads of our kernels; None: as many as torch has when a backend is made.

    Raises:
        UnsupportedOptionError: the chosen backend cannot compute this model here.
    """

    def __init__(
        self,
        choice: AttentionChoice,
        geometries: Sequence[KVGeometry],
        dtype: torch.dtype,
        heads: QueryHeads,
        device: torch.device,
        batch_invariant: bool = False,
        graph_room: GraphRoom | None = None,
        expanded_heads: ExpandedHeads | None = None,
        splits: AttentionSplits = AttentionSplits.BATCH,
        threads: KernelThreads | None = None,
    ) -> None:
        self._threads = threads
        self._heads = heads
        self._expanded_heads = expanded_heads
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        if choice is AttentionChoice.AUTO:
            choice = _choose(geometries, dtype, heads, device)
        if choice is AttentionChoice.CPU and not CpuAttention.runs(device, dtype):
            raise UnsupportedOptionError(
                f"--attention cpu has no kernels for {dtype} on {device.type}"
            )
        if batch_invariant and choice is not AttentionChoice.CPU:
            raise UnsupportedOptionError(f"--batch-invariant is not for --attention {choice}")
        self.choice = choice
        """The backend that computes; never `AUTO`."""
        if graph_room is not None and choice is not AttentionChoice.FLASHINFER:
            lack = f"they need --attention flashinfer, not {choice}"
            do_without_graphs(lack, required=graph_room.required)
            graph_room = None
        self.has_graphs = graph_room is not None
        """Whether there is room for CUDA graphs."""
        if splits is AttentionSplits.NONE:
            self._check_undivided(geometries)
        self._flashinfer = self._load_flashinfer(geometries, device, graph_room, splits)

    def for_pools(self, geometry: KVGeometry) -> KVGeometry:
        """The geometry that a pool needs for heads of `geometry`: some kernels have them padded."""
        return pad_heads(geometry) if self.choice is AttentionChoice.FLASHINFER else geometry

    def drop_graphs(self) -> None:
        """Give the memory for CUDA graphs back, once no backend has any of it."""
        assert self._flashinfer is not None
        self.has_graphs = False
        self._flashinfer.drop_graph_parts()

    @property
    def flashinfer_package(self) -> Any | None:
        """The flashinfer package, if it computes attention."""
        return None if self._flashinfer is None else self._flashinfer.package

    def make(self, pool: KVPool, scales: Sequence[KVScale] = ()) -> AttentionBackend:
        """The backend of `pool`, which has one of the geometries as they are `for_pools`.

        If the pool is in FP8, `scales` has the scale of each of its layers.
        """
        fp8 = None
        if pool.geometry.dtype is FP8:
            fp8 = Fp8Pages(pool, scales, self._dtype, self._threads)
        if self.choice is AttentionChoice.FLASHINFER:
            return self._make_flashinfer(pool, fp8)
        if fp8 is not None:
            return DequantizedAttention(fp8, self._heads, self._make_plain)
        return self._make_plain(pool)

    @property
    def most_expanded_tokens(self) -> int:
        """The most tokens of a step whose keys and values are made of latents; 0: none are made."""
        if self.choice is not AttentionChoice.FLASHINFER or not self._expands:
            return 0
        assert self._expanded_heads is not None
        return most_expanded_tokens(self._expanded_heads, self._heads.num_heads, self._dtype)

    def scratch_page_bytes(self, geometry: KVGeometry) -> int:
        """The scratch bytes beside a pool for each of its pages, if a step reads them all."""
        if geometry.dtype is not FP8 or self.choice is AttentionChoice.FLASHINFER:
            return 0
        return scratch_geometry(geometry, self._dtype).page_bytes

    @property
    def _expands(self) -> bool:
        return self._expanded_heads is not None and expands(self._expanded_heads)

    def _make_flashinfer(self, pool: KVPool, fp8: Fp8Pages | None) -> AttentionBackend:
        assert self._flashinfer is not None
        backend = FlashInferAttention(self._flashinfer, pool, self._heads, fp8)
        if not self._expands:
            return backend
        assert self._expanded_heads is not None
        wrappers = self._flashinfer.ragged_wrappers()
        return SplittingAttention(backend, self._expanded_heads, wrappers)

    def _make_plain(self, pool: KVPool) -> AttentionBackend:
        if self.choice is AttentionChoice.CPU:
            return CpuAttention(pool, self._heads, self._batch_invariant, self._threads)
        return TorchAttention(pool, self._heads)

    def _check_undivided(self, geometries: Sequence[KVGeometry]) -> None:
        if self.choice is not AttentionChoice.FLASHINFER:
            raise UnsupportedOptionError(
                f"--attention-splits none needs --attention flashinfer, not {self.choice}"
            )
        if any(one.latent for one in geometries):
            raise UnsupportedOptionError(
                "--attention-splits none: FlashInfer's kernels of latents (MLA) are not told"
            )

    def _load_flashinfer(
        self,
        geometries: Sequence[KVGeometry],
        device: torch.device,
        graph_room: GraphRoom | None,
        splits: AttentionSplits,
    ) -> FlashInfer | None:
        if self.choice is not AttentionChoice.FLASHINFER:
            return None
        for geometry in geometries:
            if lack := flashinfer_lacks(geometry, self._dtype, self._heads, device):
                raise UnsupportedOptionError(f"--attention flashinfer has no kernels for {lack}")
        flashinfer = FlashInfer(device, splits)
        padded = list(map(pad_heads, geometries))
        for geometry in padded:
            flashinfer.wrappers(geometry, self._heads)
            if self._expands:
                flashinfer.ragged_wrappers()
        if graph_room is not None:
            flashinfer.make_graph_parts(padded, self._heads, graph_room)
        return flashinfer


def _choose(
    geometries: Sequence[KVGeometry], dtype: torch.dtype, heads: QueryHeads, device: torch.device
) -> AttentionChoice:
    """The fastest backend; on a CUDA device a line in the log says why it is not FlashInfer."""
    if CpuAttention.runs(device, dtype):
        return AttentionChoice.CPU
    if device.type != "cuda":
        return AttentionChoice.TORCH
    lacks = (flashinfer_lacks(one, dtype, heads, device) for one in geometries)
    lack = next(filter(None, lacks), None)
    if lack is None:
        try:
            import_flashinfer(device)
        except UnsupportedOptionError as error:
            lack = str(error)
        else:
            return AttentionChoice.FLASHINFER
    logger.warning("attention is computed in plain torch, which is slow: FlashInfer: %s", lack)
    return AttentionChoice.TORCH
