"""A model on a device, run batch by batch over its pools: the engine's way into this room."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.processor import describe_arithmetic
from kvrelay.device.cuda_streams import make_staging, record_event
from kvrelay.device.device_streams import DeviceEvent
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.backend import AttentionBackend, AttentionFactory
from kvrelay.model_runner.attention.expanded_latents import SplittingAttention, absorbing
from kvrelay.model_runner.attention.flashinfer_attention import import_flashinfer
from kvrelay.model_runner.attention.fp8_pages import FP8
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.checkpoint.digest import object_digest
from kvrelay.model_runner.checkpoint.kv_scales import skip_kv_scales, take_kv_scales
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphRoom, do_without_graphs
from kvrelay.model_runner.config.fp8_weights import Fp8Weights
from kvrelay.model_runner.config.kv_scale import KVScale
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.model_config import MLAConfig, ModelConfig
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import NotNativeError, UnsupportedOptionError
from kvrelay.model_runner.graphs.capture import Capture, CudaCapture
from kvrelay.model_runner.graphs.decode_graphs import DecodeGraphs
from kvrelay.model_runner.layers.batch_invariant import check_invariant
from kvrelay.model_runner.layers.decoder import Decoder
from kvrelay.model_runner.layers.elementwise import Elementwise
from kvrelay.model_runner.layers.elementwise_choice import make_elementwise
from kvrelay.model_runner.layers.experts.expert_factory import (
    ExpertFactory,
    experts_wait,
    refuse_experts,
)
from kvrelay.model_runner.layers.feed_forward import expert_schemes
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.torch_options import parse_device, parse_dtype, wait_for_device
from kvrelay.model_runner.transformers_model.configuration import (
    TransformersConfig,
    read_transformers_config,
)
from kvrelay.model_runner.transformers_model.own_parts import OwnParts
from kvrelay.model_runner.transformers_model.paged_attention import LayoutAttention
from kvrelay.model_runner.transformers_model.self_proof import load_proven
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]
_MISTAKES = (AssertionError, LookupError)
"""The errors of code that is wrong; other packages' versions raise others at our lines, too."""
_WARM_UP_CHUNK = 32
"""The tokens of a warm-up chunk: more than a backend computes one by one."""


class ModelRunner:
    """A loaded checkpoint that runs forwards, one at a time, on the calling thread.

    Args:
        model_path: a folder with config.json and safetensors.
        dtype: bfloat16, float16, float32 or float64; the checkpoint's own does not matter.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on.
        threads: CPU threads of a forward, set for the whole process; None leaves torch's own.
        kernel_threads: the threads of our kernels, if another model shares them.
        draft: the model is that of a `DraftModel`, whose pools come after its target's.
        batch_invariant: a token's logits must be the same, bit for bit, whatever is computed
            beside it and in whatever chunks: all is computed by kernels of ours, and attention
            token by token. Prompts of a thousand tokens take 1.8 times as long in bfloat16.
        model_code: whose code computes the model.
        cpu_kernels: what multiplies bfloat16 on a CPU: "own", "onednn", "packed" (own, with
            weights of 4 bits as they are), or "auto", the fastest.
        moe_backend: what computes experts.
        attention: what computes attention.
        attention_splits: how FlashInfer divides a sequence's KV.
        kv_dtype: the dtype of keys and values in pages.
        graphs: the CUDA graphs of steps of decode; None: there are none.
        capture: makes the recorder of graphs.
        on_read: called with the size of each tensor that was read, in bytes.

    Raises:
        CheckpointError: the files are not usable.
        UnsupportedOptionError: a dtype or device is unknown, does not exist here or is not batch
            invariant, or attention cannot be computed with these options.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str,
        device: str,
        threads: int | None = None,
        *,
        draft: bool = False,
        batch_invariant: bool = False,
        model_code: ModelCode = ModelCode.AUTO,
        cpu_kernels: str = "auto",
        moe_backend: MoEBackend = MoEBackend.AUTO,
        attention: AttentionChoice = AttentionChoice.AUTO,
        attention_splits: AttentionSplits = AttentionSplits.BATCH,
        kv_dtype: KVDtype = KVDtype.AUTO,
        graphs: GraphOptions | None = None,
        capture: Callable[[], Capture] = CudaCapture,
        on_read: Callable[[int], None] = lambda _: None,
        kernel_threads: KernelThreads | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.kernel_threads = kernel_threads or KernelThreads()
        """The threads of our kernels in a forward; torch's own operations have others."""
        path = Path(model_path)
        self.config = read_model(path, model_code)
        if isinstance(self.config, TransformersConfig):
            refuse_native_options(batch_invariant, kv_dtype)
        self.dtype = parse_dtype(dtype)
        self.device = parse_device(device)
        if batch_invariant:
            check_invariant("a model", self.dtype, self.device)
        self._batch_invariant = batch_invariant
        self._draft = draft
        self._kv_dtype = FP8 if kv_dtype is KVDtype.FP8_E4M3 else self.dtype
        self._moe_backend = moe_backend
        self._refuse_experts()
        fused = self._import_fused_experts()
        checkpoint = self._open(path, on_read)
        self._expert_schemes: tuple[Fp8Weights | None, ...] = (
            expert_schemes(self.config, checkpoint)
            if isinstance(self.config, ModelConfig) and checkpoint is not None
            else ()
        )
        room = self._graph_room(graphs)
        # Before the weights, so that unsupported options are refused at once.
        page_size = 1 if graphs is None else graphs.page_size
        self._attention = self._make_attention(attention, attention_splits, page_size, room)
        if room is None or not self._attention.has_graphs:
            graphs = None
        self._graph_options = graphs
        self._make_capture = capture
        self._graphs: DecodeGraphs | None = None
        self._graph_logits = None if graphs is None else self._make_graph_logits(room)
        with torch.inference_mode():
            package = self._attention.flashinfer_package
            elementwise = make_elementwise(
                self.dtype, self.device, batch_invariant, package, self.kernel_threads
            )
            linears = LinearFactory(batch_invariant, self.kernel_threads, cpu_kernels)
            experts = ExpertFactory(
                moe_backend,
                self.dtype,
                self.device,
                linears,
                elementwise,
                self.kernel_threads,
                fused,
            )
            self._kv_scales: list[list[KVScale]] = [[] for _ in self.config.pool_layers]
            self._decoder, self.weights_digest = self._load(
                checkpoint, linears, elementwise, experts, on_read
            )
        self._has_own_products = linears.is_mostly_own
        self._experts_arithmetic = experts.arithmetic
        self.product_ways = linears.ways
        """The way of products with each shape of weights that has several, such as `960 x 576`."""
        self.config_digest = object_digest(self.config)
        """The hash of the configuration as it was understood."""
        self._pools: Sequence[KVPool] = ()
        self._backends: Sequence[Any] = ()

    def _make_attention(
        self,
        choice: AttentionChoice,
        splits: AttentionSplits,
        page_size: int,
        room: GraphRoom | None,
    ) -> AttentionFactory | LayoutAttention:
        geometries = self._head_geometries(page_size)
        if isinstance(self.config, TransformersConfig):
            return LayoutAttention(
                choice,
                self.config.layout,
                geometries,
                self.dtype,
                self.device,
                splits,
                self.kernel_threads,
            )
        heads = self.config.attention
        return AttentionFactory(
            choice,
            geometries,
            self.dtype,
            heads.query_heads,
            self.device,
            self._batch_invariant,
            room,
            heads.expanded_heads if isinstance(heads, MLAConfig) else None,
            splits,
            self.kernel_threads,
        )

    def _load(
        self,
        checkpoint: Checkpoint | None,
        linears: LinearFactory,
        elementwise: Elementwise,
        experts: ExpertFactory,
        on_read: Callable[[int], None],
    ) -> tuple[Decoder | TransformersDecoder, str]:
        """Load the weights: a decoder, and the hash of what it was made of."""
        dtype, device, threads = self.dtype, self.device, self.kernel_threads
        if isinstance(self.config, TransformersConfig):
            assert isinstance(self._attention, LayoutAttention)
            parts = OwnParts(linears, elementwise, experts)
            return load_proven(self.config, dtype, device, self._attention, parts, threads, on_read)
        config = self.config
        assert checkpoint is not None
        _say_what_is_dequantized(checkpoint)
        self._kv_scales = self._read_kv_scales(config, checkpoint)
        decoder = Decoder(config, checkpoint, dtype, device, linears, elementwise, experts, threads)
        return decoder, checkpoint.digest

    def _open(self, folder: Path, on_read: Callable[[int], None]) -> Checkpoint | None:
        """The checkpoint of a model of ours."""
        config = self.config
        if isinstance(config, TransformersConfig):
            return None
        return Checkpoint(
            folder, len(config.layers), self.dtype, self.device, on_read, config.quantization
        )

    @property
    def dummy_pages(self) -> int:
        """The pages at a pool's end for a graph's padding; no request may have them."""
        return 0 if self._graph_options is None else 1

    @property
    def shares_prompts(self) -> bool:
        """Whether most of a prompt's time is spent in our kernels, which threads can share.

        More threads are then faster, and results are the same to the last bit.
        """
        return self._has_own_products and self._attention.choice is AttentionChoice.CPU

    @property
    def arithmetic(self) -> str:
        """The features that the order of sums follows from, where workers must agree in every bit.

        That is in float32 and with `batch_invariant`, on a CPU. Other bfloat16 differs by batch.
        """
        exact = self._batch_invariant or self.dtype is torch.float32
        if not exact or self.device.type != "cpu":
            return ""
        orders = "+".join(filter(None, (describe_arithmetic(), self._experts_arithmetic)))
        if isinstance(self.config, ModelConfig):
            return orders
        return f"transformers {self.config.version}, {orders}"

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return self.config.max_model_len

    def make_geometries(
        self, page_size: int, order: PageOrder = PageOrder.PAGE_FIRST
    ) -> tuple[KVGeometry, ...]:
        """The pages that this model needs, one geometry a pool.

        Layers with full attention share the first pool, those with a window another. A model that
        has only one kind has one pool. A batch's page tables are in the same order, a draft model's
        after its target's.
        """
        geometries = self._head_geometries(page_size, order)
        return tuple(map(self._attention.for_pools, geometries))

    def _head_geometries(
        self, page_size: int, order: PageOrder = PageOrder.PAGE_FIRST
    ) -> tuple[KVGeometry, ...]:
        """The same with heads of the model's own dimensions, whatever kernels need."""
        return tuple(
            KVGeometry(
                num_layers=one.num_layers,
                num_kv_heads=one.num_kv_heads,
                head_dim=one.head_dim,
                dtype=self._kv_dtype,
                page_size=page_size,
                order=order,
                latent=one.latent,
                window=one.window,
                draft=self._draft,
            )
            for one in self.config.pool_layers
        )

    def bind(self, pools: Sequence[KVPool]) -> None:
        """Use `pools` from now on: one for each of this model's geometries, on its device."""
        first = pools[0].geometry
        expected = self.make_geometries(first.page_size, first.order)
        assert tuple(pool.geometry for pool in pools) == expected
        assert all(pool.data.device.type == self.device.type for pool in pools)
        self._pools = tuple(pools)
        self._backends = self._make_backends(pools)
        self._graphs = None

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs over the bound pools, after `warm_up`. May take a minute."""
        if self._graph_options is not None:
            self._graphs = self._capture_if_possible(self._pools, self._backends)

    def warm_up(self, rows_first: bool = False) -> None:
        """Compile and load what a first forward needs. May take seconds.

        Runs over small pools of its own: the bound pools' pages are not touched.

        Args:
            rows_first: begin with what a row needs, not with what a prompt needs. Of two processes
                that begin together, one in each order, each compiles about half for both.
        """
        assert self._pools, "bind pools first"
        chunk = self._warm_up_chunk()
        pages = 2 * self._pools[0].geometry.pages_for(chunk)
        scratch = [KVPool(pool.geometry, pages, self.device) for pool in self._pools]
        backends = self._make_backends(scratch)
        with torch.inference_mode():
            # A chunk beside a decode row, a few tokens as when drafts are verified, a row alone.
            batches = ([chunk, 1], [3, 1], [1])
            for new_tokens in reversed(batches) if rows_first else batches:
                self._decoder.forward(_warm_up_batch(new_tokens, scratch), backends)
                wait_for_device(self.device)  # before the next plan

    def _warm_up_chunk(self) -> int:
        """The tokens of a chunk that each backend computes as a long one."""
        expanding = [one for one in self._backends if isinstance(one, SplittingAttention)]
        return max([_WARM_UP_CHUNK, *(one.least_new_tokens for one in expanding)])

    def largest_contexts(self, longest: int) -> tuple[int, ...]:
        """The context lengths, up to `longest`, with which a chunk takes the most memory.

        Keys and values are made of latents only for contexts that are short enough. So the longest
        such
        context is one of them.
        """
        made = self._attention.most_expanded_tokens
        return (longest, made, longest) if 0 < made < longest else (longest, longest)

    def run_largest(self, chunk_tokens: int, rows: int, context: int) -> torch.Tensor:
        """Compute a batch that takes as much memory as any, over its own scratch pages.

        Pools need not be bound. A step has more rows of logits than this only if it has more rows.

        Args:
            chunk_tokens: the tokens at the end of a prompt of `context` tokens; of several prompts
                if `context` is less. All are scored.
            rows: the sequences beside it, of one token each.
            context: the tokens of the longest sequence.

        Returns:
            ``[chunk_tokens + rows, vocab_size]`` logits.
        """
        scratch = [KVPool(geometry, 1, self.device) for geometry in self._scratch_geometries()]
        new = _split(chunk_tokens, context) + [1] * rows
        lengths = [context, *new[1:]]
        starts = np.concatenate(([0], np.cumsum(new)))
        firsts = zip(lengths, new, strict=True)
        pages = scratch[0].geometry.pages_for(context)
        batch = ForwardBatch(
            input_ids=np.zeros(starts[-1], np.int64),
            positions=np.concatenate([np.arange(end - count, end) for end, count in firsts]),
            query_start=starts.astype(np.int32),
            seq_lens=np.array(lengths, np.int32),
            page_tables=(np.zeros((len(new), pages), np.int32),) * len(scratch),
            logit_rows=np.arange(starts[-1]),
        )
        if isinstance(self._decoder, TransformersDecoder):
            self._decoder.hold_latents(context)  # no step takes more than this one
        with torch.inference_mode():
            logits = self._decoder.forward(batch, self._make_backends(scratch))
        wait_for_device(self.device)  # before the next plan
        return logits

    def capture_on_scratch(self) -> object:
        """Capture the CUDA graphs over scratch pages; the result holds their memory."""
        options = self._graph_options
        if options is None:
            return None
        scratch = [
            KVPool(geometry, 1 + self.dummy_pages, self.device, self.dummy_pages)
            for geometry in self.make_geometries(options.page_size)
        ]
        return self._capture_if_possible(scratch, self._make_backends(scratch))

    def _capture_if_possible(
        self, pools: Sequence[KVPool], backends: Sequence[AttentionBackend]
    ) -> DecodeGraphs | None:
        """Capture the graphs; None, once and for all, if that fails and they are not required."""
        assert self._graph_options is not None
        try:
            return self._capture(pools, backends)
        except Exception as error:
            if self._graph_options.required or _is_our_mistake(error):
                raise
            do_without_graphs(f"{type(error).__name__}: {error}")
        self._graph_options = self._graph_logits = None
        self._attention.drop_graphs()
        return None

    @property
    def scratch_part(self) -> float:
        """The most scratch bytes for each byte of the pools, if a step reads all of their pages."""
        geometries = self.make_geometries(1)
        return max(self._attention.scratch_page_bytes(one) / one.page_bytes for one in geometries)

    def _scratch_geometries(self) -> tuple[KVGeometry, ...]:
        """The geometries of scratch pools; those of the bound pools, if there are any."""
        if self._pools:
            return tuple(pool.geometry for pool in self._pools)
        return self.make_geometries(_WARM_UP_CHUNK)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Call `launch` and wait: keys and values are written when this returns."""
        logits = self.launch(batch)
        # Wait until it has run: peers read pages as soon as this returns.
        wait_for_device(self.device)
        return logits

    def launch(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's keys and values to the bound pools, by work on the current stream.

        A device may still run when this returns. The next but one may be launched only when this
        one has run: there is memory for two plans.

        Args:
            batch: may have the tables of a target's and of its draft model's pools: each
                takes its own.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``, on the device.
        """
        assert self._backends, "bind pools first"
        own = self._with_own_tables(batch)
        with torch.inference_mode():
            logits = None if self._graphs is None else self._graphs.forward(own)
            return self._decoder.forward(own, self._backends) if logits is None else logits

    def record(self) -> DeviceEvent:
        """Record an event behind all that was launched on the current stream."""
        return record_event(self.device)

    def own_tables(self, page_tables: Sequence[Int32Array]) -> tuple[Int32Array, ...]:
        """The tables of this model's pools in a batch: a target's are first, a draft's last."""
        count = len(self.config.pool_layers)
        assert len(page_tables) >= count
        return tuple(page_tables[-count:] if self._draft else page_tables[:count])

    def _with_own_tables(self, batch: ForwardBatch) -> ForwardBatch:
        if len(batch.page_tables) == len(self._pools):
            return batch
        return replace(batch, page_tables=self.own_tables(batch.page_tables))

    def _capture(
        self, pools: Sequence[KVPool], backends: Sequence[AttentionBackend]
    ) -> DecodeGraphs:
        options, room = self._graph_options, self._graph_room(self._graph_options)
        assert options is not None
        assert room is not None
        assert self._graph_logits is not None
        assert isinstance(self._decoder, Decoder)
        assert pools[0].geometry.page_size == options.page_size
        with torch.inference_mode():
            graphs = DecodeGraphs(
                self._decoder,
                list(map(absorbing, backends)),
                pools,
                room,
                self._graph_logits,
                self._make_capture(),
                partial(wait_for_device, self.device),
                make_staging(self.device),
                partial(record_event, self.device),
            )
            graphs.capture_all()
        return graphs

    def _read_kv_scales(self, config: ModelConfig, checkpoint: Checkpoint) -> list[list[KVScale]]:
        """The scales of each pool's layers; empty if pages are not in FP8."""
        num_layers = len(config.layers)
        scales: list[list[KVScale]] = [[] for _ in config.pool_windows]
        if self._kv_dtype is not FP8:
            skip_kv_scales(checkpoint, num_layers)
            return scales
        all_scales = take_kv_scales(checkpoint, num_layers)
        for (pool, _), scale in zip(config.layer_pools, all_scales, strict=True):
            scales[pool].append(scale)
        return scales

    def _make_graph_logits(self, room: GraphRoom | None) -> torch.Tensor:
        """The logits that all graphs write, allocated before pools are."""
        assert room is not None
        shape = (room.most_rows, self.config.vocab_size)
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _graph_room(self, options: GraphOptions | None) -> GraphRoom | None:
        """The sizes of graphs; raises `UnsupportedOptionError` where there can be no graphs."""
        if options is None:
            return None
        schemes, backend = self._expert_schemes, self._moe_backend
        lack = graphs_lack(self.config, schemes, backend, self.dtype, self.device)
        if lack is not None:
            do_without_graphs(lack, required=options.required)
            return None
        return make_graph_room(self.config, options)

    def _refuse_experts(self) -> None:
        if isinstance(self.config, ModelConfig):
            for layer in self.config.layers:
                if layer.moe is not None:
                    gate = layer.moe.clamped or self.config.activation
                    invariant = self._batch_invariant
                    refuse_experts(self._moe_backend, self.dtype, self.device, gate, invariant)

    def _import_fused_experts(self) -> Any | None:
        """FlashInfer's module of experts, if the user asks for it and the model has any."""
        if not self._has_experts or self._moe_backend is not MoEBackend.FLASHINFER:
            return None
        package = import_flashinfer(self.device, f"--moe-backend {self._moe_backend}")
        return package.fused_moe

    @property
    def _has_experts(self) -> bool:
        """Whether it is a model of ours with experts."""
        config = self.config
        return isinstance(config, ModelConfig) and any(one.moe is not None for one in config.layers)

    def _make_backends(self, pools: Sequence[KVPool]) -> tuple[Any, ...]:
        """One for each pool: an `AttentionBackend`, or a `PoolAttention`."""
        if isinstance(self._attention, LayoutAttention):
            return self._attention.make_all(pools)
        return tuple(map(self._attention.make, pools, self._kv_scales))


def read_model(folder: Path, code: ModelCode) -> ModelConfig | TransformersConfig:
    """Read config.json for the code that will compute the model."""
    if code is ModelCode.TRANSFORMERS:
        return read_transformers_config(folder)
    try:
        return read_config(folder)
    except NotNativeError:
        if code is ModelCode.NATIVE:
            raise
        return read_transformers_config(folder)


def refuse_native_options(batch_invariant: bool, kv_dtype: KVDtype) -> None:
    """Refuse options that transformers' model code does not have: `UnsupportedOptionError`."""
    code = "transformers' model code (--model-code)"
    if batch_invariant:
        raise UnsupportedOptionError(f"--batch-invariant is not for {code}")
    if kv_dtype is KVDtype.FP8_E4M3:
        raise UnsupportedOptionError(f"--kv-dtype {kv_dtype} is not for {code}")


def graphs_lack(
    config: ModelConfig | TransformersConfig,
    schemes: Iterable[Fp8Weights | None],
    backend: MoEBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """The reason why steps of a model are no CUDA graphs, whatever its attention; None: they are.

    Args:
        config: the model.
        schemes: the schemes in FP8 that its experts have.
        backend: what computes its experts.
        dtype: the model's.
        device: the model's.
    """
    if isinstance(config, TransformersConfig):
        return "not for transformers' model code (--model-code)"
    waits = (experts_wait(backend, scheme, dtype, device) for scheme in schemes)
    wait = next(filter(None, waits), None)
    return None if wait is None else f"not for these experts: {wait}"


def make_graph_room(config: ModelConfig | TransformersConfig, options: GraphOptions) -> GraphRoom:
    """Make the limits of the graphs of a model."""
    # Kernels of graphs do not know sequences that are shorter than what they bring.
    windows = [pool.window for pool in config.pool_layers if pool.window is not None]
    most_each = min(options.most_each, config.max_model_len, *windows)
    return GraphRoom(options.sizes, config.max_model_len, options.required, most_each)


def _is_our_mistake(error: Exception) -> bool:
    """Whether a line of this package is wrong, and not what torch, FlashInfer or a GPU refuse."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    is_ours = innermost.f_globals["__name__"].startswith(f"{_PACKAGE}.")
    return is_ours and isinstance(error, _MISTAKES)


def _split(tokens: int, most: int) -> list[int]:
    """`tokens` divided into parts of `most`, and one of the rest."""
    return [min(most, tokens - start) for start in range(0, tokens, most)]


def _warm_up_batch(new_tokens: list[int], pools: Sequence[KVPool]) -> ForwardBatch:
    """A batch of new sequences of `new_tokens` tokens, each with pages of its own."""
    pages_each = pools[0].geometry.pages_for(max(new_tokens))
    page_table = np.arange(len(new_tokens) * pages_each, dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(new_tokens))).astype(np.int32)
    return ForwardBatch(
        input_ids=np.zeros(query_start[-1], np.int64),
        positions=np.concatenate([np.arange(n) for n in new_tokens]),
        query_start=query_start,
        seq_lens=np.array(new_tokens, np.int32),
        page_tables=(page_table.reshape(len(new_tokens), pages_each),) * len(pools),
        logit_rows=query_start[1:].astype(np.int64) - 1,
    )


def _say_what_is_dequantized(checkpoint: Checkpoint) -> None:
    """Log the memory of weights in few bits before any is taken.

    On a CPU products may keep those of 4 bits, which is known when they are made.
    """
    stored, numbers = checkpoint.packed_sizes()
    if numbers:
        dtype = checkpoint.dtype
        logger.info(
            "weights in few bits, %.1f MiB, take %.1f MiB where they become %s",
            stored / 2**20,
            numbers * dtype.itemsize / 2**20,
            str(dtype).removeprefix("torch."),
        )
