"""FlashInfer's elementwise functions without its kernels: they check, and compute in torch.

Each has the parameters of flashinfer-python 0.7 that are used. What its kernels would read wrongly,
or not at all, is refused: other dtypes and devices, rows and strides that 16 bytes do not divide,
addresses that are not aligned, no rows (a launch of no blocks fails). What is written in place is
overwritten here, too. On fake tensors only the checks run.
"""

# ruff: noqa: A002 - the parameters have the names of the package's

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.model_runner.graph_double import kernel, launched

ROTATED_DIMS = (64, 128, 256, 512)
APPENDED_DIMS = (64, 128, 256, 512)
APPENDED_LATENTS = ((512, 64),)
VECTOR_BYTES = 16

calls: Counter[str] = Counter()
"""By function."""


def check_vectors(name: str, *tensors: torch.Tensor) -> None:
    """The rows of all tensors are on one device, and a thread reads 16 aligned bytes of them."""
    calls[name] += 1
    for one in tensors:
        size = one.dtype.itemsize
        assert one.device == tensors[0].device, "another device"
        assert len(one) > 0, "a launch of no blocks"
        assert one.stride(-1) == 1, "the stride of the last dimension"
        assert one.shape[-1] * size % VECTOR_BYTES == 0, "a row of broken vectors"
        strides = [one.stride(dim) for dim in range(one.ndim - 1) if one.shape[dim] > 1]
        assert all(stride * size % VECTOR_BYTES == 0 for stride in strides), "unaligned rows"
        assert one.storage_offset() * size % VECTOR_BYTES == 0, "an unaligned address"


def check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.shape == x.shape[-1:]
    assert weight.is_contiguous()
    assert weight.dtype is x.dtype, "kernels read the weight as of the input's dtype"
    assert weight.device == x.device, "another device"


def in_place(target: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Launch what overwrites `target`."""
    if isinstance(target, FakeTensor):
        return target
    return kernel(lambda: target.copy_(compute()))


def made(like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Launch what makes a tensor of the shape of `like`."""
    if isinstance(like, FakeTensor):
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return kernel(compute)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: float) -> torch.Tensor:
    """In float32, not rounded."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * scale * (weight.float() + bias)


@launched
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    assert input.ndim in (2, 3)
    check_vectors("rmsnorm", input, *([] if out is None else [out]))
    check_norm(input, weight)
    if out is None:
        return made(input, lambda: normed(input, weight, eps, 0).to(input.dtype))
    assert out.shape == input.shape
    assert out.dtype is input.dtype
    return in_place(out, lambda: normed(input, weight, eps, 0))


@launched
def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    assert input.ndim == 2, "it is documented for rows, and one of its two kernels refuses others"
    check_vectors("gemma_rmsnorm", input)
    check_norm(input, weight)
    return made(input, lambda: normed(input, weight, eps, 1).to(input.dtype))


def add_norm(
    name: str,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: float,
) -> None:
    assert x.ndim == 2
    assert x.shape == residual.shape
    assert x.dtype is residual.dtype
    check_vectors(name, x, residual)
    check_norm(x, weight)
    if isinstance(x, FakeTensor):
        return
    assert x.data_ptr() != residual.data_ptr()

    def compute() -> torch.Tensor:
        total = x.float() + residual.float()
        residual.copy_(total)
        return normed(total, weight, eps, bias)

    in_place(x, compute)


@launched
def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    add_norm("fused_add_rmsnorm", input, residual, weight, eps, 0)


@launched
def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    add_norm("gemma_fused_add_rmsnorm", input, residual, weight, eps, 1)


def act_and_mul(
    name: str, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    # The second half of a row begins behind the first.
    check_vectors(name, x, gate, up)
    assert x.is_contiguous(), "kernels know no strides"
    return made(gate, lambda: (activate(gate.float()) * up.float()).to(x.dtype))


@launched
def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    return act_and_mul("silu_and_mul", input, torch.nn.functional.silu)


@launched
def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    gelu = torch.nn.functional.gelu
    return act_and_mul("gelu_tanh_and_mul", input, lambda x: gelu(x, approximate="tanh"))


@launched
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    assert is_neox
    assert head_size in ROTATED_DIMS
    check_vectors("apply_rope_with_cos_sin_cache_inplace", query, key)
    assert positions.dtype in (torch.int32, torch.int64)
    assert positions.shape == (len(query),) == (len(key),)
    assert cos_sin_cache.dtype is torch.float32, "the table is float32"
    assert cos_sin_cache.ndim == 2
    rotary_dim = cos_sin_cache.shape[1]
    assert rotary_dim <= head_size, "dimensions behind it stay as they are"
    assert rotary_dim in ROTATED_DIMS, "a thread's vector turns as a whole"
    assert cos_sin_cache.is_contiguous()
    assert query.dtype is key.dtype
    assert positions.device == cos_sin_cache.device == query.device, "another device"
    for heads in (query, key):
        turned = heads.view(len(heads), -1, head_size)
        assert turned.shape[1] > 0
        in_place(turned, partial(rotated, turned, cos_sin_cache, positions))


def rotated(
    heads: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Of ``heads [T, n, D]``, in float32."""
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, dim=-1)
    turning, rest = heads[..., : 2 * cos.shape[-1]], heads[..., 2 * cos.shape[-1] :]
    first, second = turning.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, rest.float()), dim=-1)


def check_sequences(
    count: int, page_size: int, total_pages: int, device: torch.device, **arrays: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `count` tokens go, if that can be known: pages, and slots in them."""
    tokens, positions = arrays["batch_indices"], arrays["positions"]
    indices, indptr = arrays["kv_indices"], arrays["kv_indptr"]
    lengths = arrays["kv_last_page_len"]
    for array in arrays.values():
        assert array.dtype is torch.int32, "a copy of another type would be made for each layer"
        assert array.device == device, "another device"
        assert array.ndim == 1
        assert array.is_contiguous()
    assert len(tokens) == len(positions) == count > 0
    assert len(indptr) == len(lengths) + 1
    if isinstance(indptr, FakeTensor):
        return indices, positions
    assert indptr[0] == 0
    assert bool((indptr.diff() >= 1).all())
    assert int(indptr[-1]) <= len(indices)
    assert bool(((tokens >= 0) & (tokens < len(lengths))).all())
    assert bool(((lengths >= 1) & (lengths <= page_size)).all())
    ends = (indptr.diff() - 1) * page_size + lengths
    assert bool(((positions >= 0) & (positions < ends[tokens.long()])).all()), "past the sequence"
    pages = indices[(indptr[tokens.long()] + positions // page_size).long()]
    assert bool(((pages >= 0) & (pages < total_pages)).all()), "no page of the pool"
    return pages.long(), positions.long() % page_size


def store(pages: torch.Tensor, where: tuple[torch.Tensor, ...], new: torch.Tensor) -> torch.Tensor:
    """A copy of bytes: kernels know no conversion."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.dtype.itemsize]
    pages.view(whole)[where] = new.view(whole)
    return pages


@launched
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert kv_layout == "HND"
    arrays = {name: one for name, one in locals().items() if name[:3] in ("bat", "pos", "kv_")}
    del arrays["kv_layout"]
    keys, values = paged_kv_cache
    total, heads, page_size, dim = keys.shape
    check_vectors("append_paged_kv_cache", append_key, append_value, keys, values)
    assert dim in APPENDED_DIMS
    assert heads * dim // max(16 // keys.dtype.itemsize, dim // 32) <= 1024, "threads of a block"
    assert keys.shape == values.shape
    assert keys.stride() == values.stride()
    assert keys.stride(0) < 2**32
    assert append_key.shape == append_value.shape == (len(append_key), heads, dim)
    assert append_key.dtype is append_value.dtype is keys.dtype is values.dtype, "another dtype"

    def compute() -> torch.Tensor:
        page_ids, slots = check_sequences(len(append_key), page_size, total, keys.device, **arrays)
        for target, new in ((keys, append_key), (values, append_value)):
            store(target.transpose(1, 2), (page_ids, slots), new)
        return keys

    if isinstance(keys, FakeTensor):
        check_sequences(len(append_key), page_size, total, keys.device, **arrays)
    else:
        kernel(compute)


@launched
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    arrays = {name: one for name, one in locals().items() if name[:3] in ("bat", "pos", "kv_")}
    total, page_size, dim = ckv_cache.shape
    check_vectors("append_paged_mla_kv_cache", append_ckv, append_kpe, ckv_cache, kpe_cache)
    assert (dim, kpe_cache.shape[2]) in APPENDED_LATENTS
    assert kpe_cache.shape[:2] == (total, page_size)
    assert append_ckv.shape == (len(append_ckv), dim)
    assert append_kpe.shape == (len(append_ckv), kpe_cache.shape[2])
    dtypes = {one.dtype for one in (append_ckv, append_kpe, ckv_cache, kpe_cache)}
    assert len(dtypes) == 1, "another dtype"

    def compute() -> torch.Tensor:
        places = check_sequences(len(append_ckv), page_size, total, ckv_cache.device, **arrays)
        store(kpe_cache, places, append_kpe)
        return store(ckv_cache, places, append_ckv)

    if isinstance(ckv_cache, FakeTensor):
        check_sequences(len(append_ckv), page_size, total, ckv_cache.device, **arrays)
    else:
        kernel(compute)


FUNCTIONS = (
    rmsnorm,
    gemma_rmsnorm,
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    silu_and_mul,
    gelu_tanh_and_mul,
    apply_rope_with_cos_sin_cache_inplace,
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
)
PACKAGE = SimpleNamespace(**{one.__name__: one for one in FUNCTIONS})
"""In place of ``import flashinfer``."""
