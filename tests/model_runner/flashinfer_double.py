"""FlashInfer's wrappers without its kernels: they check what they are given, and compute slowly.

Each method has the parameters of flashinfer-python 0.7 that are used, under their names there,
and refuses what its kernels would read wrongly or not at all: arrays of another type than int32
or on another device than the host, shapes, dtypes and strides. The results are those of plain
attention over the same arrays. On fake tensors only the checks run; planned arrays must be real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from tests.known import known
from tests.model_runner import flashinfer_elementwise_double, fused_moe_double
from tests.model_runner.graph_double import Recording, kernel, launched

HOST = torch.device("cpu")
FP8 = torch.float8_e4m3fn
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
FP8_LATENTS = ((512, 64),)
FP8_LATENT_DTYPES = (torch.bfloat16,)


@dataclass(frozen=True)
class Pages:
    """The planned arrays, checked."""

    indptr: torch.Tensor
    indices: torch.Tensor
    kv_lens: torch.Tensor

    def of(self, index: int) -> torch.Tensor:
        return self.indices[self.indptr[index] : self.indptr[index + 1]].long()


def check_array(array: torch.Tensor, length: int) -> None:
    assert array.dtype is torch.int32, "kernels read int32"
    assert array.device == HOST, "plan() would wait for a copy to the host"
    assert array.shape == (length,)
    assert array.is_contiguous()


def check_page_indices(indices: torch.Tensor, count: int, device: torch.device) -> None:
    """Those of the host would be copied, and waited for where a graph's memory is the target."""
    assert indices.dtype is torch.int32, "kernels read int32"
    assert indices.device == device, "page ids on another device"
    assert indices.shape == (count,)
    assert indices.is_contiguous()


def check_indptr(indptr: torch.Tensor, batch_size: int) -> None:
    check_array(indptr, batch_size + 1)
    assert indptr[0] == 0
    assert bool((indptr.diff() >= 0).all())


def check_pages(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    device: torch.device,
) -> Pages:
    batch_size = len(last_page_len)
    assert batch_size > 0, "its plan takes the maximum of the lengths"
    check_indptr(indptr, batch_size)
    check_page_indices(indices, int(indptr[-1]), device)
    check_array(last_page_len, batch_size)
    counts = indptr.diff()
    assert bool((last_page_len[counts > 0] >= 1).all())
    assert bool((last_page_len <= page_size).all())
    # As `flashinfer.page.get_seq_lens`.
    return Pages(indptr, indices, (counts - 1).clamp(min=0) * page_size + last_page_len)


def check_tokens_each(tokens_each: int, pages: Pages) -> None:
    """A first query would see nothing."""
    assert int(pages.kv_lens.min()) >= tokens_each, "more queries than there are tokens"


def check_page_ids(pages: Pages, total_pages: int) -> None:
    if isinstance(pages.indices, FakeTensor):
        return
    assert bool((pages.indices >= 0).all())
    assert bool((pages.indices < total_pages).all())


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
) -> torch.Tensor:
    """``[new, heads, dim]`` over ``[heads, seen, dim]``, compared from the end as kernels do."""
    new, seen = len(queries), keys.shape[1]
    scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys.float()) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(new)[:, None], torch.arange(seen)[None]
    if causal:
        scores = scores.masked_fill(key + new > seen + query, -torch.inf)
    if window_left >= 0:
        scores = scores.masked_fill(key + new + window_left < seen + query, -torch.inf)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values.float()).to(queries.dtype)


def is_scale(scale: float | None) -> bool:
    return scale is not None and math.isfinite(scale) and scale > 0


@dataclass(frozen=True)
class Buffers:
    """What a graph's kernels read: `plan` writes here, and the sizes stay."""

    indptr: torch.Tensor | None
    indices: torch.Tensor | None
    lengths: torch.Tensor | None

    def fill(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        *,
        device: torch.device,
    ) -> None:
        assert Recording.current is None, "plan() is not captured"
        assert self.indptr is not None
        assert self.indices is not None
        assert self.lengths is not None
        for buffer in (self.indptr, self.indices, self.lengths):
            assert buffer.dtype is torch.int32
            assert buffer.device == device
        assert len(self.lengths) == len(lengths), "a graph's batch size is fixed"
        assert len(self.indptr) == len(indptr)
        assert len(self.indices) >= len(indices), "more pages than the buffer has room for"
        if isinstance(self.indptr, FakeTensor):
            return
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.lengths.copy_(lengths)

    def pages(self, page_size: int) -> Pages:
        assert self.indptr is not None
        assert self.indices is not None
        assert self.lengths is not None
        counts = self.indptr.diff()
        lengths = (counts - 1).clamp(min=0) * page_size + self.lengths
        return Pages(self.indptr, self.indices, lengths)


class PlanMemory:
    """A plan: made in pinned memory, from which work on the current stream copies it."""

    @unset_fake_temporarily()
    def __init__(self) -> None:
        self._pinned = torch.zeros(4096, dtype=torch.int32)
        self._on_device = torch.zeros_like(self._pinned)

    @unset_fake_temporarily()
    def make(self, *arrays: torch.Tensor) -> None:
        numbers = np.concatenate([one.numpy() for one in arrays])
        self._pinned.numpy()[: len(numbers)] = numbers
        self._on_device[: len(numbers)].copy_(self._pinned[: len(numbers)])

    def first(self, count: int) -> torch.Tensor:
        return self._on_device[:count]


class Grouped:
    """What prefill and decode wrappers share."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = True,
        backend: str = "auto",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype is torch.uint8
        self._device = float_workspace_buffer.device
        self._tensor_cores = use_tensor_cores
        self._backend = backend
        self.divides = True
        """Whether the latest plan divides the KV of a sequence."""
        buffers = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self._buffers = Buffers(*buffers) if use_cuda_graph else None
        self._query_buffer: torch.Tensor | None = None
        if paged_kv_indptr_buffer is not None:
            self._query_buffer = torch.zeros_like(paged_kv_indptr_buffer)
        self._memory = PlanMemory()
        self.plans = self.fast_plans = self.runs = 0

    def _plan(
        self,
        query_indptr: torch.Tensor,
        pages: Pages,
        options: dict[str, Any],
    ) -> None:
        group, rest = divmod(options["num_qo_heads"], options["num_kv_heads"])
        assert rest == 0
        assert self._tensor_cores or group in CUDA_CORE_GROUPS
        self.divides = not options["disable_split_kv"]
        if not self.divides:
            assert self._tensor_cores, "kernels without tensor cores are not told of splits"
            assert self._backend == "fa2", "fa3 is not told of splits"
        if options["kv_data_type"] is not options["q_data_type"]:
            assert options["kv_data_type"] is FP8
            assert self._backend == "fa2", "fa3 takes queries in FP8 alone"
        if self._buffers is not None:
            arrays = (pages.indptr, pages.indices, options["last_page_len"])
            self._buffers.fill(*arrays, device=self._device)
            self._memory.make(pages.indptr.diff())
            if not isinstance(self._query_buffer, FakeTensor):
                known(self._query_buffer).copy_(query_indptr)
        self._query_indptr, self._pages, self._options = query_indptr, pages, options
        self.plans += 1

    @launched
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        options, (keys, values) = self._options, paged_kv_cache
        heads, dim = options["num_qo_heads"], options["head_dim"]
        assert q.shape == (int(self._query_indptr[-1]), heads, dim)
        page = (options["num_kv_heads"], options["page_size"], dim)
        assert keys.shape[1:] == values.shape[1:] == page
        assert keys.stride() == values.stride()
        assert keys.stride(0) < 2**32
        assert q.stride(-1) == keys.stride(-1) == 1, "the stride of the last dimension"
        assert q.dtype is options["q_data_type"], "another dtype"
        assert keys.dtype is values.dtype is options["kv_data_type"], "another dtype"
        assert (keys.dtype is FP8) == (k_scale is not None) == (v_scale is not None)
        assert q.device == keys.device == values.device == self._device
        assert out.shape == q.shape
        assert out.dtype is q.dtype, "the dtype of results is that of queries"
        assert out.device == self._device
        assert out.is_contiguous(), "kernels know no strides of results"
        check_page_ids(self._pages, len(keys))
        self.runs += 1
        if isinstance(q, FakeTensor):
            return out
        return kernel(lambda: out.copy_(self._compute(q, keys, values, k_scale, v_scale)))

    def _compute(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        k_scale: float | None,
        v_scale: float | None,
    ) -> torch.Tensor:
        options, pages, starts = self._options, self._pages, self._query_indptr
        if self._buffers is not None:
            pages, starts = self._buffers.pages(options["page_size"]), known(self._query_buffer)
            counts = pages.indptr.diff()
            assert torch.equal(self._memory.first(len(counts)), counts), "a plan of other pages"
        out = torch.empty(q.shape, dtype=q.dtype)
        group = options["num_qo_heads"] // options["num_kv_heads"]
        for index, kv_len in enumerate(pages.kv_lens.tolist()):
            rows = slice(*starts[index : index + 2].tolist())
            gathered = [
                # [pages, heads, page_size, dim] to [heads, tokens, dim]
                (part[pages.of(index)].float() * (scale or 1.0))
                .transpose(0, 1)
                .flatten(1, 2)[:, :kv_len]
                for part, scale in ((keys, k_scale), (values, v_scale))
            ]
            out[rows] = attend(
                q[rows],
                *(part.repeat_interleave(group, 0) for part in gathered),
                scale=options["sm_scale"],
                causal=options["causal"],
                window_left=options["window_left"],
                softcap=options["logits_soft_cap"] or 0.0,
            )
        return out


class Prefill(Grouped):
    @unset_fake_temporarily()
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        disable_split_kv: bool = False,
    ) -> None:
        options = {key: value for key, value in locals().items() if key != "self"}
        pages = check_pages(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, self._device
        )
        check_indptr(qo_indptr, len(paged_kv_last_page_len))
        self._plan(
            qo_indptr,
            pages,
            options | {"head_dim": head_dim_qk, "last_page_len": paged_kv_last_page_len},
        )


class Decode(Grouped):
    @unset_fake_temporarily()
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        options = {key: value for key, value in locals().items() if key != "self"}
        pages = check_pages(indptr, indices, last_page_len, page_size, self._device)
        check_tokens_each(q_len_per_req, pages)
        if q_len_per_req > 1:
            assert self._tensor_cores, "kernels without tensor cores take one token a sequence"
            assert self._backend == "fa2", "fa3 takes one token a sequence"
        if self._buffers is not None and self.plans:
            assert q_len_per_req == self._options["q_len_per_req"], "a graph's number is fixed"
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32) * q_len_per_req
        self._plan(starts, pages, options | {"causal": q_len_per_req > 1})

    def replan(self, pages: Pages, indices: torch.Tensor, options: dict[str, Any]) -> None:
        """A plan for the arrays that the buffers have; the one before is overwritten at once."""
        assert Recording.current is None, "plan() is not captured"
        assert self._buffers is not None
        assert self._buffers.indices is not None
        assert self.plans, "it takes the module of an earlier plan"
        if not isinstance(indices, FakeTensor):
            assert indices.data_ptr() == self._buffers.indices.data_ptr(), "nobody copies page ids"
        assert options.items() <= self._options.items()
        with _disable_current_modes():
            check_tokens_each(options["q_len_per_req"], pages)
            counts = pages.indptr.diff()
        if options["q_len_per_req"] > 1:
            known(self._query_buffer).copy_(self._query_indptr)
        self._memory.make(counts)
        self.fast_plans += 1


def fast_decode_plan(
    self: Decode,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
) -> None:
    arrays = ("self", "indptr", "indices", "last_page_len")
    options = {key: value for key, value in locals().items() if key not in (*arrays, "arrays")}
    with _disable_current_modes():
        pages = check_pages(indptr, indices, last_page_len, page_size, self._device)
    self.replan(pages, indices, options)


@dataclass(frozen=True)
class Metadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> Metadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


LATENT_KEY_TILE = 16
"""The least tile of keys over latents, on the smallest GPUs; an H100's is of 64."""


def check_tiles(q_lens: list[int], kv_lens: list[int], num_heads: int) -> None:
    """As fa2's `_validate_fa_causal_tile_bound`: no visible key is left out at a tile's end."""
    tile = 64 * (2 if sum(q_lens) * num_heads // len(q_lens) > 64 else 1)
    if tile % num_heads == 0:
        return
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for end in range(tile, q_len * num_heads, tile):
            query, within = divmod(end, num_heads)
            key = kv_len - q_len + query
            omitted = within and query < q_len and 0 <= key < kv_len and key % LATENT_KEY_TILE == 0
            assert not omitted, "MLA causal tile boundary is unsupported"


class Latent:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa2"
        self._device = float_workspace_buffer.device
        self._buffers = Buffers(kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None
        self._fixed_queries = qo_indptr
        self._memory = PlanMemory()
        self._float_workspace_buffer = float_workspace_buffer
        self.plans = self.fast_plans = 0

    @unset_fake_temporarily()
    def plan(
        self,
        *,
        metadata: Metadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        batch_size = len(metadata.kv_len_arr)
        assert batch_size > 0
        check_indptr(metadata.qo_indptr, batch_size)
        check_indptr(metadata.kv_indptr, batch_size)
        check_page_indices(metadata.kv_indices, int(metadata.kv_indptr[-1]), self._device)
        check_array(metadata.kv_len_arr, batch_size)
        counts = -(-metadata.kv_len_arr // page_size)
        assert torch.equal(counts, metadata.kv_indptr.diff())
        if kv_data_type is not q_data_type:
            assert kv_data_type is FP8
            assert q_data_type in FP8_LATENT_DTYPES
            assert (head_dim_ckv, head_dim_kpe) in FP8_LATENTS
        if causal:
            check_tiles(metadata.qo_indptr.diff().tolist(), metadata.kv_len_arr.tolist(), num_heads)
        self._pages = Pages(metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        if self._buffers is not None:
            assert self._fixed_queries is not None
            assert self._fixed_queries.shape == metadata.qo_indptr.shape
            arrays = (metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
            self._buffers.fill(*arrays, device=self._device)
            self._memory.make(metadata.kv_indptr, metadata.kv_len_arr)
        # What FlashInfer shows of its latest plan.
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = self._memory
        self._cached_module = SimpleNamespace(plan=self._replan)
        self._options = {key: value for key, value in locals().items() if key != "self"}
        self.plans += 1

    def _replan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: PlanMemory,
        pinned_workspace: PlanMemory,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> None:
        assert Recording.current is None, "plan() is not captured"
        assert float_workspace is self._float_workspace_buffer
        assert int_workspace is pinned_workspace is self._memory
        with _disable_current_modes():
            check_indptr(qo_indptr, len(kv_len_arr))
            check_indptr(kv_indptr, len(kv_len_arr))
            # The number of blocks in a cluster is in the graph.
            assert torch.equal(qo_indptr, self._options["metadata"].qo_indptr)
            new = qo_indptr.diff()
            assert bool((kv_len_arr >= new).all())
            check_tiles(new.tolist(), kv_len_arr.tolist(), num_heads)
        options = (self._options["num_heads"], self._options["head_dim_ckv"])
        assert (num_heads, head_dim_o, causal) == (*options, self._options["causal"])
        self._memory.make(kv_indptr, kv_len_arr)
        self.fast_plans += 1

    @launched
    def run(
        self,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor:
        options, indptr = self._options, self._options["metadata"].qo_indptr
        dim, value_dim = sum(query.shape[-1:]), options["head_dim_ckv"]
        assert dim == value_dim + options["head_dim_kpe"]
        assert query.shape == (int(indptr[-1]), options["num_heads"], dim)
        assert kv_cache.shape[1:] == (options["page_size"], dim)
        assert kv_cache.stride(0) < 2**32
        assert query.stride(-1) == kv_cache.stride(-1) == 1, "the stride of the last dimension"
        assert query.dtype is options["q_data_type"], "another dtype"
        assert kv_cache.dtype is options["kv_data_type"], "another dtype"
        scales = (ckv_scale, kpe_scale)
        assert (kv_cache.dtype is FP8) == (None not in scales) == any(map(is_scale, scales))
        assert query.device == kv_cache.device == self._device
        check_page_ids(self._pages, len(kv_cache))
        shape = (*query.shape[:2], value_dim)
        if isinstance(query, FakeTensor):
            return query.new_empty(shape)
        return kernel(lambda: self._compute(query, kv_cache, *scales))

    def _compute(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        ckv_scale: float | None,
        kpe_scale: float | None,
    ) -> torch.Tensor:
        options, pages = self._options, self._pages
        indptr, value_dim = options["metadata"].qo_indptr, options["head_dim_ckv"]
        if self._buffers is not None:
            assert self._buffers.indices is not None
            count = len(indptr)
            planned = self._memory.first(2 * count - 1)
            # Kernels have these from the plan, and nothing but page ids from the buffers.
            pages = Pages(planned[:count], self._buffers.indices, planned[count:])
        out = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype)
        for index, kv_len in enumerate(pages.kv_lens.tolist()):
            rows = slice(*indptr[index : index + 2].tolist())
            latents = kv_cache[pages.of(index)].flatten(0, 1)[:kv_len].float()
            latents[:, :value_dim] *= ckv_scale or 1.0
            latents[:, value_dim:] *= kpe_scale or 1.0
            latents = latents.expand(options["num_heads"], -1, -1)
            out[rows] = attend(
                query[rows],
                latents,
                latents[..., :value_dim],
                scale=options["sm_scale"],
                causal=options["causal"],
                window_left=-1,
                softcap=0.0,
            )
        return out


class Ragged:
    """Of keys and values in no pages."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        self._device = float_workspace_buffer.device
        self.plans = self.runs = 0

    @unset_fake_temporarily()
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        check_indptr(qo_indptr, len(qo_indptr) - 1)
        check_indptr(kv_indptr, len(qo_indptr) - 1)
        assert bool((kv_indptr.diff() >= qo_indptr.diff()).all())
        assert num_qo_heads == num_kv_heads
        assert kv_data_type is q_data_type
        assert causal
        self._options = {key: value for key, value in locals().items() if key != "self"}
        self.plans += 1

    @launched
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = self._options
        new, seen = options["qo_indptr"], options["kv_indptr"]
        heads, dim, value_dim = (
            options[name] for name in ("num_qo_heads", "head_dim_qk", "head_dim_vo")
        )
        assert q.shape == (int(new[-1]), heads, dim)
        assert k.shape == (int(seen[-1]), heads, dim)
        assert v.shape == (int(seen[-1]), heads, value_dim)
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert q.dtype is k.dtype is v.dtype is options["q_data_type"], "another dtype"
        assert q.device == k.device == v.device == self._device
        self.runs += 1
        if isinstance(q, FakeTensor):
            return q.new_empty(len(q), heads, value_dim)
        out = torch.empty(len(q), heads, value_dim, dtype=q.dtype)
        for index in range(len(new) - 1):
            rows, keys = (slice(*one[index : index + 2].tolist()) for one in (new, seen))
            out[rows] = attend(
                q[rows],
                k[keys].transpose(0, 1),
                v[keys].transpose(0, 1),
                scale=options["sm_scale"],
                causal=True,
                window_left=-1,
                softcap=0.0,
            )
        return out


PACKAGE = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=Prefill,
    BatchDecodeWithPagedKVCacheWrapper=Decode,
    fast_decode_plan=fast_decode_plan,
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    fused_moe=fused_moe_double.PACKAGE,
    mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent, MLAPlanMetadata=Metadata),
    **vars(flashinfer_elementwise_double.PACKAGE),
)
"""In place of ``import flashinfer``."""
