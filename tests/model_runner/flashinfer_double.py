"""FlashInfer's wrappers without its kernels: they check what they are given, and compute slowly.

Each method has the parameters of flashinfer-python 0.7 that are used, under their names there,
and refuses what its kernels would read wrongly or not at all: arrays of another type than int32
or on another device than the host, shapes, dtypes and strides. The results are those of plain
attention over the same arrays. On fake tensors only the checks run; planned arrays must be real.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

HOST = torch.device("cpu")
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


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


def check_indptr(indptr: torch.Tensor, batch_size: int) -> None:
    check_array(indptr, batch_size + 1)
    assert indptr[0] == 0
    assert bool((indptr.diff() >= 0).all())


def check_pages(
    indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> Pages:
    batch_size = len(last_page_len)
    assert batch_size > 0, "its plan takes the maximum of the lengths"
    check_indptr(indptr, batch_size)
    check_array(indices, int(indptr[-1]))
    check_array(last_page_len, batch_size)
    counts = indptr.diff()
    assert bool((last_page_len[counts > 0] >= 1).all())
    assert bool((last_page_len <= page_size).all())
    # As `flashinfer.page.get_seq_lens`.
    return Pages(indptr, indices, (counts - 1).clamp(min=0) * page_size + last_page_len)


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


class Grouped:
    """What prefill and decode wrappers share."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = True,
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype is torch.uint8
        self._device = float_workspace_buffer.device
        self._tensor_cores = use_tensor_cores
        self.plans = 0

    def _plan(
        self,
        query_indptr: torch.Tensor,
        pages: Pages,
        options: dict[str, Any],
    ) -> None:
        group, rest = divmod(options["num_qo_heads"], options["num_kv_heads"])
        assert rest == 0
        assert self._tensor_cores or group in CUDA_CORE_GROUPS
        assert options["kv_data_type"] is options["q_data_type"]
        self._query_indptr, self._pages, self._options = query_indptr, pages, options
        self.plans += 1

    @unset_fake_temporarily()
    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        options, (keys, values) = self._options, paged_kv_cache
        heads, dim = options["num_qo_heads"], options["head_dim"]
        assert q.shape == (int(self._query_indptr[-1]), heads, dim)
        page = (options["num_kv_heads"], options["page_size"], dim)
        assert keys.shape[1:] == values.shape[1:] == page
        assert keys.stride() == values.stride()
        assert keys.stride(0) < 2**32
        assert q.stride(-1) == keys.stride(-1) == 1, "the stride of the last dimension"
        assert q.dtype is keys.dtype is values.dtype is options["q_data_type"], "another dtype"
        assert q.device == keys.device == values.device == self._device
        assert bool((self._pages.indices >= 0).all())
        assert bool((self._pages.indices < len(keys)).all())
        if isinstance(q, FakeTensor):
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        out = torch.empty(q.shape, dtype=q.dtype)
        group = heads // options["num_kv_heads"]
        for index, kv_len in enumerate(self._pages.kv_lens.tolist()):
            rows = slice(*self._query_indptr[index : index + 2].tolist())
            gathered = [
                # [pages, heads, page_size, dim] to [heads, tokens, dim]
                part[self._pages.of(index)].transpose(0, 1).flatten(1, 2)[:, :kv_len]
                for part in (keys, values)
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
    ) -> None:
        options = {key: value for key, value in locals().items() if key != "self"}
        pages = check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        check_indptr(qo_indptr, len(paged_kv_last_page_len))
        self._plan(qo_indptr, pages, options | {"head_dim": head_dim_qk})


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
    ) -> None:
        options = {key: value for key, value in locals().items() if key != "self"}
        pages = check_pages(indptr, indices, last_page_len, page_size)
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(one_each, pages, options | {"causal": False})


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


class Latent:
    def __init__(self, float_workspace_buffer: torch.Tensor, *, backend: str = "auto") -> None:
        assert backend == "fa2"
        self._device = float_workspace_buffer.device
        self.plans = 0

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
        check_array(metadata.kv_indices, int(metadata.kv_indptr[-1]))
        check_array(metadata.kv_len_arr, batch_size)
        counts = -(-metadata.kv_len_arr // page_size)
        assert torch.equal(counts, metadata.kv_indptr.diff())
        assert kv_data_type is q_data_type
        self._pages = Pages(metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        self._options = {key: value for key, value in locals().items() if key != "self"}
        self.plans += 1

    @unset_fake_temporarily()
    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        options, indptr = self._options, self._options["metadata"].qo_indptr
        dim, value_dim = sum(query.shape[-1:]), options["head_dim_ckv"]
        assert dim == value_dim + options["head_dim_kpe"]
        assert query.shape == (int(indptr[-1]), options["num_heads"], dim)
        assert kv_cache.shape[1:] == (options["page_size"], dim)
        assert kv_cache.stride(0) < 2**32
        assert query.stride(-1) == kv_cache.stride(-1) == 1, "the stride of the last dimension"
        assert query.dtype is kv_cache.dtype is options["q_data_type"], "another dtype"
        assert query.device == kv_cache.device == self._device
        assert bool((self._pages.indices >= 0).all())
        assert bool((self._pages.indices < len(kv_cache)).all())
        shape = (*query.shape[:2], value_dim)
        if isinstance(query, FakeTensor):
            return query.new_empty(shape)
        out = torch.empty(shape, dtype=query.dtype)
        for index, kv_len in enumerate(self._pages.kv_lens.tolist()):
            rows = slice(*indptr[index : index + 2].tolist())
            latents = kv_cache[self._pages.of(index)].flatten(0, 1)[:kv_len]
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


PACKAGE = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=Prefill,
    BatchDecodeWithPagedKVCacheWrapper=Decode,
    mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=Latent, MLAPlanMetadata=Metadata),
)
"""In place of ``import flashinfer``."""
