"""Attention on CUDA devices by FlashInfer's kernels, which read a pool's pages in place.

The only file that imports flashinfer, and only when this backend is chosen.

Each pool of a step is planned once, for all of the pool's layers, from arrays on the host; a layer
then only launches kernels. The sequences at the beginning of a step that bring one token each run
the decode kernels, which divide the KV of each of them. All others (prompts, and drafts to verify)
run the prefill kernels behind them. Latents (MLA) have kernels of their own for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch.nn import functional

from kvrelay.device.device_streams import STEPS_IN_FLIGHT
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionSplits
from kvrelay.model_runner.attention.device_table import DeviceTable, gather_page_ids
from kvrelay.model_runner.attention.flashinfer_append import (
    AppendedTokens,
    AppendKernel,
    appends,
)
from kvrelay.model_runner.attention.flashinfer_buffers import GraphBuffers
from kvrelay.model_runner.attention.flashinfer_compiler import (
    compiler_lacks,
    link_lazily,
    offer_own_ninja,
)
from kvrelay.model_runner.attention.fp8_pages import FP8, Fp8Pages
from kvrelay.model_runner.attention.new_tokens import NewTokens, StaticNewTokens
from kvrelay.model_runner.attention.paged_plan import PagedPlan, plan_pages
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.cuda_graphs import GraphRoom, GraphShape
from kvrelay.model_runner.config.query_heads import ExpandedHeads, QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError

WORKSPACE_BYTES: Final = 128 << 20
"""The device bytes of partial results, shared by all wrappers: as FlashInfer recommends."""
WRAPPER_BYTES: Final = 8 << 20
"""The device bytes that each wrapper allocates for its plan; it pins as many on the host."""
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
"""The head dimensions that both generations of prefill kernels have, ascending."""
LATENT_MULTIPLE, ROTARY_MULTIPLE = 128, 64
"""The dimensions of a latent, and of its rotary key, are multiples of these."""
MOST_LATENT_HEADS: Final = 128
"""The query heads over latents of the largest tile of queries, in which kernels are causal."""
FP8_LATENTS = ((512, 64),)
"""The dimensions of latents and of their rotary keys that are read in FP8."""
FP8_LATENT_DTYPES = (torch.bfloat16,)
"""The dtypes of queries over latents in FP8."""
EXPANDED_DIMS = ((192, 128), *((dim, dim) for dim in HEAD_DIMS))
"""The dimensions of keys and values outside of pages: DeepSeek's, and equal ones."""
CUDA_CORE_GROUPS = (1, 2, 3)
"""The query heads a KV head that the decode kernels without tensor cores compute.

They have 4, 6, 8 and 16, too, where tensor cores are faster; they do not have 5 and 7.
"""
MAX_PAGE_STRIDE = 2**32
"""The elements from page to page of a layer that kernels can count: they use 32 bits."""
_LEAST_CAPABILITY: Final = (8, 0)
_HOPPER: Final = 9
"""The major compute capability of GPUs whose kernels read latents in FP8."""


class Wrapper(Protocol):
    """FlashInfer's wrapper of one kind of kernel.

    Its plan lies in its own pinned memory, and work on the current stream copies it to the device.
    Plan again only once that work has run.
    """

    def plan(self, *args: Any, **options: Any) -> None:
        """Divide the work of the coming layers; arrays are on the host."""
        ...

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        """Launch the kernels of one layer, as planned."""
        ...


WrapperSets: TypeAlias = Sequence[tuple[Wrapper, ...]]


class PlannedRows(NamedTuple):
    """Rows of a step that one kind of kernels computes, as it was planned."""

    wrapper: Wrapper
    rows: slice
    empty_heads: int = 0
    """The query heads that were planned behind the model's own, with nothing in them."""


def flashinfer_lacks(
    geometry: KVGeometry, dtype: torch.dtype, heads: QueryHeads, device: torch.device
) -> str | None:
    """The property of this model that FlashInfer has no kernels for, in a few words; None: no such.

    `dtype` is that of queries.
    """
    if dtype not in DTYPES:
        return f"dtype {_name(dtype)}"
    if geometry.latent:
        rotary = geometry.head_dim - heads.value_dim
        if heads.value_dim % LATENT_MULTIPLE or rotary % ROTARY_MULTIPLE or not rotary:
            return f"latents of {heads.value_dim} and {rotary} dimensions"
        if geometry.window is not None or heads.softcap is not None:
            return "windows or soft caps over latents"
        if heads.num_heads > MOST_LATENT_HEADS:
            return f"{heads.num_heads} query heads over latents"
        return _fp8_latents_lack(geometry, dtype, heads, device)
    if _padded_dim(geometry.head_dim) is None:
        return f"heads of {geometry.head_dim} dimensions"
    return None


def pad_heads(geometry: KVGeometry) -> KVGeometry:
    """The geometry of the pools of such heads: of more dimensions, zeros, if kernels need them."""
    dim = geometry.head_dim if geometry.latent else _padded_dim(geometry.head_dim)
    assert dim is not None
    return replace(geometry, head_dim=dim)


def _padded_dim(head_dim: int) -> int | None:
    """The fewest dimensions, `head_dim` at least, that there are kernels for; None: too many."""
    return next((dim for dim in HEAD_DIMS if dim >= head_dim), None)


def fitting_heads(num_heads: int) -> int:
    """The fewest query heads over latents, `num_heads` at least, that fill tiles of 64 or 128.

    Where a tile ends within a token, FlashInfer's causal kernels (0.7.2) may leave out the last key
    that it sees. FlashInfer refuses to plan them then.
    """
    return 1 << (num_heads - 1).bit_length()


def _fp8_latents_lack(
    geometry: KVGeometry, dtype: torch.dtype, heads: QueryHeads, device: torch.device
) -> str | None:
    """The property of latents in FP8 that kernels lack; None as in `flashinfer_lacks`."""
    if geometry.dtype is not FP8:
        return None
    dims = (heads.value_dim, geometry.head_dim - heads.value_dim)
    if dims not in FP8_LATENTS:
        return f"latents in FP8 of {dims[0]} and {dims[1]} dimensions"
    if dtype not in FP8_LATENT_DTYPES:
        return f"latents in FP8 with queries in {_name(dtype)}"
    # A CPU is refused later, with another line.
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "latents in FP8 on GPUs that are not sm_90"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def expands(heads: ExpandedHeads) -> bool:
    """Whether there are kernels for keys and values that are made of latents."""
    return (heads.key_dim, heads.value_dim) in EXPANDED_DIMS


def import_flashinfer(device: torch.device, option: str = "--attention flashinfer") -> Any:
    """Import and return the flashinfer package, for an `option` that errors name.

    Raises:
        UnsupportedOptionError: it is not installed, it cannot compile its kernels, or `device` is
            no GPU that it supports.
    """
    if device.type != "cuda":
        raise UnsupportedOptionError(f"{option} needs a CUDA device, not {device.type}")
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise UnsupportedOptionError(f"{option} needs a GPU of sm_80 or later")
    offer_own_ninja()
    link_lazily()
    try:
        package = importlib.import_module("flashinfer")
    # RuntimeError: packages of compiled kernels that are of another version.
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedOptionError(
            f"{option}: the package is not usable here ({error}): pip install 'kvrelay[cuda]'"
        ) from error
    if lack := compiler_lacks():
        raise UnsupportedOptionError(f"{option} cannot compile its kernels: {lack}")
    return package


class FlashInfer:
    """The flashinfer package with one model's workspace on one device, allocated before pools are.

    Wrappers that run one after the other on one stream share the workspace.

    Args:
        device: a GPU.
        splits: how kernels divide a sequence's KV. Pieces of a fixed size would not depend on the
            batch either. But each token would have partial results, for which no workspace is large
            enough.

    Raises:
        UnsupportedOptionError: as `import_flashinfer`.
    """

    def __init__(
        self, device: torch.device, splits: AttentionSplits = AttentionSplits.BATCH
    ) -> None:
        self.package = import_flashinfer(device)
        """The flashinfer package."""
        self._divides = splits is AttentionSplits.BATCH
        self._device = device
        # Zeroed: the decode kernels expect it.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int | None, WrapperSets] = {}
        self.graph_buffers: GraphBuffers | None = None
        """The memory of CUDA graphs; None: there are none."""
        self._graph_wrappers: dict[tuple[int, GraphShape], Wrapper] = {}
        self._ragged: tuple[Wrapper, ...] = ()

    @property
    def split_options(self) -> dict[str, object]:
        """The options of all plans but those of latents: whether a sequence's KV may be divided."""
        return {} if self._divides else {"disable_split_kv": True}

    @property
    def nbytes(self) -> int:
        """The device bytes that the workspace and the wrappers have taken so far."""
        sets = [one for both in self._wrappers.values() for one in both]
        wrappers = sum(map(len, sets)) + len(self._graph_wrappers) + len(self._ragged)
        buffers = self.graph_buffers
        taken = 0 if buffers is None else buffers.nbytes
        return WORKSPACE_BYTES + WRAPPER_BYTES * wrappers + taken

    def wrappers(self, geometry: KVGeometry, heads: QueryHeads) -> WrapperSets:
        """The wrappers of a model's pools with this window, made once.

        There is a set for each step in flight. A set has the wrapper for latents, or those for
        prefill and decode.
        """
        if geometry.window not in self._wrappers:
            make = self._make_latent if geometry.latent else self._make_grouped
            sets = [make(geometry, heads) for _ in range(STEPS_IN_FLIGHT)]
            self._wrappers[geometry.window] = sets
        return self._wrappers[geometry.window]

    def ragged_wrappers(self) -> tuple[Wrapper, ...]:
        """The wrappers for keys and values outside of pages: one for each step in flight."""
        if not self._ragged:
            ragged = self.package.BatchPrefillWithRaggedKVCacheWrapper
            self._ragged = tuple(
                ragged(self._workspace, kv_layout="NHD") for _ in range(STEPS_IN_FLIGHT)
            )
        return self._ragged

    def make_graph_parts(
        self, geometries: Sequence[KVGeometry], heads: QueryHeads, room: GraphRoom
    ) -> None:
        """Make the memory for the CUDA graphs of a model's pools, and a wrapper for each shape."""
        buffers = GraphBuffers(geometries, room, self._device)
        self.graph_buffers = buffers
        for pool, geometry in enumerate(geometries):
            for shape in room.shapes:
                arrays = buffers.of_wrapper(pool, shape)
                if geometry.latent:
                    wrapper = self._make_latent_graph(arrays)
                else:
                    wrapper = self._make_decode(
                        geometry, heads, shape.each, use_cuda_graph=True, **arrays
                    )
                self._graph_wrappers[pool, shape] = wrapper

    def drop_graph_parts(self) -> None:
        """Give that memory, and these wrappers, back, once no graph has them."""
        self.graph_buffers = None
        self._graph_wrappers.clear()

    def graph_wrapper(self, pool: int, shape: GraphShape) -> Wrapper:
        """The wrapper of a pool's graph of this shape, made before."""
        return self._graph_wrappers[pool, shape]

    def csr_metadata(self, *arrays: torch.Tensor) -> object:
        """The metadata that the latents' wrapper takes its arrays in."""
        return self.package.mla.MLAPlanMetadata.csr(*arrays)

    def to_host(self, array: Int32Array) -> torch.Tensor:
        """`array` in pinned memory, so that copies to the device need not be waited for."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def as_tensor(self, array: Int32Array) -> torch.Tensor:
        """`array` itself, for what the host alone reads, and at once."""
        return torch.from_numpy(array)

    def _make_latent(self, _geometry: KVGeometry, _heads: QueryHeads) -> tuple[Wrapper, ...]:
        # fa2 runs from sm_80 on and reads latents in place, whatever the page's size.
        return (self.package.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2"),)

    def _make_latent_graph(self, buffers: Mapping[str, torch.Tensor]) -> Wrapper:
        wrapper: Wrapper = self.package.mla.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=True, backend="fa2", **buffers
        )
        return wrapper

    def _make_grouped(self, geometry: KVGeometry, heads: QueryHeads) -> tuple[Wrapper, ...]:
        prefill = self.package.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, kv_layout="HND", backend=self._backend_of(geometry)
        )
        return (prefill, self._make_decode(geometry, heads))

    def _make_decode(
        self, geometry: KVGeometry, heads: QueryHeads, tokens_each: int = 1, **options: Any
    ) -> Wrapper:
        group = heads.num_heads // geometry.num_kv_heads
        on_cuda_cores = group in CUDA_CORE_GROUPS and tokens_each == 1
        wrapper: Wrapper = self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="HND",
            # The only one that has decode kernels for single tokens.
            backend="fa2",
            # Kernels without tensor cores have no option not to divide.
            use_tensor_cores=not on_cuda_cores or not self._divides,
            **options,
        )
        return wrapper

    def _backend_of(self, geometry: KVGeometry) -> str:
        """The generation of kernels.

        Hopper's kernels (fa3) need queries in FP8 if KV is, and have no option for splits.
        """
        return "fa2" if geometry.dtype is FP8 or not self._divides else "auto"


class FlashInferAttention:
    """The `AttentionBackend` of CUDA devices. A plan is valid until the next one is made.

    Args:
        flashinfer: the package on the pool's device.
        pool: the pool of keys and values.
        heads: the query heads, with scale and softcap.
        fp8: the pool's pages, if they are in FP8.

    Raises:
        UnsupportedOptionError: there is no kernel for such a pool.
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        pool: KVPool,
        heads: QueryHeads,
        fp8: Fp8Pages | None = None,
    ) -> None:
        self.dtype = pool.geometry.dtype if fp8 is None else fp8.dtype
        """The dtype of queries and of results."""
        if lack := flashinfer_lacks(pool.geometry, self.dtype, heads, pool.data.device):
            raise UnsupportedOptionError(f"--attention flashinfer has no kernels for {lack}")
        assert pool.geometry == pad_heads(pool.geometry)
        if pool.layer(0).stride(0) >= MAX_PAGE_STRIDE:
            raise UnsupportedOptionError(
                f"--attention flashinfer: pages of {pool.geometry.page_size} tokens are too large; "
                "a smaller --page-size, or --page-order layer_first"
            )
        self.flashinfer = flashinfer
        self.pool = pool
        self.heads = heads
        self.fp8 = fp8
        self._sets = flashinfer.wrappers(pool.geometry, heads)
        self._turn = 0
        self.table = DeviceTable(pool.data.device)
        """The page table of the latest step, of graphs too."""
        self.latest: FlashInferStepAttention | None = None
        self._append: AppendKernel | None = None
        if appends(pool.geometry, heads.value_dim):
            self._append = AppendKernel(flashinfer.package, pool.geometry, heads.value_dim)

    def locate(self, batch: ForwardBatch, page_table: Int32Array) -> NewTokens:
        """The new tokens of `batch`, to be written by FlashInfer's kernel if there is one."""
        if self._append is None:
            return NewTokens(batch, page_table, self.pool)
        return self._append.locate(batch, page_table, self.pool.data.device)

    def static_tokens(self, page_ids: torch.Tensor, slots: torch.Tensor) -> StaticNewTokens:
        """New tokens, written to the places that these arrays hold when `write` runs."""
        if self._append is None:
            return StaticNewTokens(page_ids, slots)
        return AppendedTokens(page_ids, slots, self._append)

    @property
    def wrappers(self) -> tuple[Wrapper, ...]:
        """The wrappers of the latest plan."""
        return self._sets[self._turn]

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> FlashInferStepAttention:
        """Plan the kernels of `batch`. Earlier plans must launch nothing any more.

        Kernels of the plan before may still run; kernels of earlier ones may not.
        """
        self._turn = (self._turn + 1) % len(self._sets)
        self.latest = FlashInferStepAttention(self, batch, page_table)
        return self.latest

    def lay_out(
        self, batch: ForwardBatch, page_table: Int32Array
    ) -> tuple[PagedPlan, torch.Tensor]:
        """The arrays of `batch`, and its page ids on the device, to which only changes are sent."""
        plan = plan_pages(batch, self.pool.geometry)
        return plan, gather_page_ids(self.table.update(page_table), plan)

    def plan_decode(self, wrapper: Wrapper, plan: PagedPlan, page_ids: torch.Tensor) -> None:
        """Plan kernels for one new token of each sequence; kernels of latents take any number.

        Wrappers of graphs also take a larger number, the same for all sequences.
        """
        if self.pool.geometry.latent:
            self._plan_latent(wrapper, plan, page_ids)
        else:
            geometry = self.pool.geometry
            wrapper.plan(
                *self._pages(plan, page_ids),
                head_dim=geometry.head_dim,
                q_len_per_req=plan.tokens_each,
                **self.flashinfer.split_options,
                **self._options(),
            )

    def replan_decode(self, wrapper: Wrapper, plan: PagedPlan, page_ids: torch.Tensor) -> None:
        """Plan a graph's kernels anew, whose buffers have the arrays of `plan` already.

        FlashInfer's `plan` would copy them there again. For latents it also clones these buffers
        and the plan's 8 MiB before, to undo what fails.
        """
        geometry, heads = self.pool.geometry, self.heads
        as_tensor = self.flashinfer.as_tensor
        if not geometry.latent:
            self.flashinfer.package.fast_decode_plan(
                wrapper,
                as_tensor(plan.kv_indptr),
                page_ids,
                as_tensor(plan.last_page_len),
                head_dim=geometry.head_dim,
                q_len_per_req=plan.tokens_each,
                **self.flashinfer.split_options,
                **self._options(),
            )
            return
        arrays = (plan.query_indptr, plan.kv_indptr, plan.kv_lens)
        # What a wrapper shows of its latest plan for this purpose, as SGLang uses it.
        latest: Any = wrapper
        latest._cached_module.plan(
            latest._float_workspace_buffer,
            latest._int_workspace_buffer,
            latest._pin_memory_int_workspace_buffer,
            *map(as_tensor, arrays),
            heads.num_heads + self.empty_heads(is_decode=plan.is_decode),
            heads.value_dim,
            True,
        )

    def plan_prefill(self, wrapper: Wrapper, plan: PagedPlan, page_ids: torch.Tensor) -> None:
        """Plan kernels for any number of new tokens."""
        wrapper.plan(
            self.flashinfer.to_host(plan.query_indptr),
            *self._pages(plan, page_ids),
            head_dim_qk=self.pool.geometry.head_dim,
            causal=True,
            **self.flashinfer.split_options,
            **self._options(),
        )

    def empty_heads(self, *, is_decode: bool) -> int:
        """The query heads to be planned behind the model's own, with nothing in them.

        A tile of queries over latents must not end within a token, unless it has one sequence's
        only token, as in a step of decode.
        """
        if is_decode or not self.pool.geometry.latent:
            return 0
        return fitting_heads(self.heads.num_heads) - self.heads.num_heads

    def attend(
        self, parts: Sequence[PlannedRows], new_tokens: NewTokens, layer: int, rows: torch.Tensor
    ) -> torch.Tensor:
        """Write and attend as planned; shapes as in `StepAttention.attend`.

        The parts are of all rows, in their order. Latents have one part.
        """
        num_heads, fp8 = self.heads.num_heads, self.fp8
        if missing := self.pool.geometry.head_dim - rows.shape[2]:
            rows = functional.pad(rows, (0, missing))
        pages, queries, new = self.pool.layer(layer), rows[:, :num_heads], rows[:, num_heads:]
        new_tokens.write(pages, new if fp8 is None else fp8.quantize(layer, new))
        if self.pool.geometry.latent:
            [part] = parts
            latents = pages[:, 0, 0]  # one part, one head: [pages, page_size, head_dim]
            scales = {}
            if fp8 is not None:  # of the latent and of its rotary key: they are one vector here
                scales = dict.fromkeys(("ckv_scale", "kpe_scale"), fp8.scales[layer].key)
            if part.empty_heads:
                queries = functional.pad(queries, (0, 0, 0, part.empty_heads))
            sums = part.wrapper.run(query=queries, kv_cache=latents, **scales)
            return sums[:, :num_heads].flatten(1)
        scales = {}
        if fp8 is not None:
            scales = {"k_scale": fp8.scales[layer].key, "v_scale": fp8.scales[layer].value}
        # Without `out` the prefill kernels' results would be zeroed before they are written.
        results, both = queries.new_empty(queries.shape), (pages[:, 0], pages[:, 1])
        for part in parts:
            part.wrapper.run(queries[part.rows], both, out=results[part.rows], **scales)
        return results[..., : self.heads.value_dim].flatten(1)

    def _pages(self, plan: PagedPlan, page_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        to_host = self.flashinfer.to_host
        return to_host(plan.kv_indptr), page_ids, to_host(plan.last_page_len)

    def _options(self) -> dict[str, object]:
        heads, geometry = self.heads, self.pool.geometry
        return {
            "num_qo_heads": heads.num_heads,
            "num_kv_heads": geometry.num_kv_heads,
            "page_size": geometry.page_size,
            "sm_scale": heads.scale,
            # They count the tokens before a query's own.
            "window_left": -1 if geometry.window is None else geometry.window - 1,
            "logits_soft_cap": heads.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": geometry.dtype,
        }

    def _plan_latent(self, wrapper: Wrapper, plan: PagedPlan, page_ids: torch.Tensor) -> None:
        heads, geometry, to_host = self.heads, self.pool.geometry, self.flashinfer.to_host
        starts = (to_host(plan.query_indptr), to_host(plan.kv_indptr))
        wrapper.plan(
            metadata=self.flashinfer.csr_metadata(*starts, page_ids, to_host(plan.kv_lens)),
            num_heads=heads.num_heads + self.empty_heads(is_decode=plan.is_decode),
            head_dim_ckv=heads.value_dim,
            head_dim_kpe=geometry.head_dim - heads.value_dim,
            page_size=geometry.page_size,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=self.dtype,
            kv_data_type=geometry.dtype,
        )


class FlashInferStepAttention:
    """The `StepAttention` of `FlashInferAttention`."""

    def __init__(
        self, backend: FlashInferAttention, batch: ForwardBatch, page_table: Int32Array
    ) -> None:
        self._backend = backend
        self._new_tokens = backend.locate(batch, page_table)
        self._parts: Sequence[PlannedRows] = ()
        if len(batch.positions):
            self._parts = self._plan(*backend.lay_out(batch, page_table))

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        backend = self._backend
        assert backend.latest is self, "a later plan has taken this one's place"
        if not self._parts:
            return rows.new_empty(0, backend.heads.num_heads * backend.heads.value_dim)
        return backend.attend(self._parts, self._new_tokens, layer, rows)

    def _plan(self, plan: PagedPlan, page_ids: torch.Tensor) -> Sequence[PlannedRows]:
        """Plan the decode kernels for the first rows, and the prefill kernels for the others."""
        backend, wrappers = self._backend, self._backend.wrappers
        count, decodes = len(plan.last_page_len), plan.num_decodes
        if plan.is_decode or backend.pool.geometry.latent:
            backend.plan_decode(wrappers[-1], plan, page_ids)
            empty_heads = backend.empty_heads(is_decode=plan.is_decode)
            return [PlannedRows(wrappers[-1], slice(None), empty_heads)]
        parts = []
        if decodes:
            backend.plan_decode(wrappers[-1], *_part_of(plan, page_ids, 0, decodes))
            parts.append(PlannedRows(wrappers[-1], slice(decodes)))
        backend.plan_prefill(wrappers[0], *_part_of(plan, page_ids, decodes, count))
        return [*parts, PlannedRows(wrappers[0], slice(decodes, None))]


def _part_of(
    plan: PagedPlan, page_ids: torch.Tensor, first: int, end: int
) -> tuple[PagedPlan, torch.Tensor]:
    """The sequences ``[first, end)`` of a plan, and their page ids."""
    return plan.part(first, end), page_ids[plan.kv_indptr[first] : plan.kv_indptr[end]]
