"""The compiled CPU backend agrees with the one in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import make_attention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.cpu_attention import CpuAttention
from kvrelay.model_runner.torch_attention import TorchAttention

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make_batch(lengths: list[tuple[int, int]], page_size: int, total_pages: int) -> ForwardBatch:
    """Sequences of (new tokens, tokens in all), on shuffled pages."""
    new = [n for n, _ in lengths]
    pages_each = max(-(-all_ // page_size) for _, all_ in lengths)
    pages = np.random.default_rng(2).permutation(total_pages)[: len(lengths) * pages_each]
    query_start = np.cumsum([0, *new]).astype(np.int32)
    return ForwardBatch(
        input_ids=np.zeros(query_start[-1], np.int64),
        positions=np.concatenate([np.arange(all_ - n, all_) for n, all_ in lengths]),
        query_start=query_start,
        seq_lens=np.array([all_ for _, all_ in lengths], np.int32),
        page_tables=pages.reshape(len(lengths), pages_each).astype(np.int32),
        logit_rows=np.empty(0, np.int64),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_torch(
    dtype: torch.dtype, page_size: int, order: PageOrder, threads: int
) -> None:
    # More tokens than the decode rows are split from, and a chunk in the middle.
    lengths = [(1, 700), (4, 9), (1, 1), (1, 16), (20, 20), (1, 500), (1, 17)]
    geometry = KVGeometry(2, 3, 24, dtype, page_size, order)
    torch.manual_seed(0)
    first = KVPool(geometry, 7 * geometry.pages_for(700) + 3, CPU)
    first.data.normal_()
    second = KVPool(geometry, first.total_pages, CPU)
    second.data.copy_(first.data)
    batch = make_batch(lengths, page_size, first.total_pages)
    qkv = torch.randn(len(batch.positions), 6 + 2 * 3, 24).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = CpuAttention(first, 6).plan(batch).attend(1, qkv)
    finally:
        torch.set_num_threads(before)
    expected = TorchAttention(second, 6).plan(batch).attend(1, qkv)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(first.data, second.data)


def test_large_scores_do_not_overflow() -> None:
    geometry = KVGeometry(1, 1, 8, torch.float32, 4)
    pool = KVPool(geometry, 4, CPU)
    pool.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(100)
    batch = make_batch([(1, 10)], 4, 4)
    qkv = torch.full((1, 3, 8), 50.0)
    got = CpuAttention(pool, 1).plan(batch).attend(0, qkv)
    expected = TorchAttention(pool, 1).plan(batch).attend(0, qkv)
    torch.testing.assert_close(got, expected)


def test_nan_is_not_hidden() -> None:
    pool = KVPool(KVGeometry(1, 1, 8, torch.bfloat16, 4), 4, CPU)
    qkv = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    qkv[0, 0, 3] = torch.nan
    attended = CpuAttention(pool, 1).plan(make_batch([(1, 10)], 4, 4)).attend(0, qkv)
    assert attended.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, CpuAttention),
        (torch.float32, CpuAttention),
        (torch.float16, TorchAttention),
        (torch.float64, TorchAttention),
    ],
)
def test_backend_by_dtype(dtype: torch.dtype, backend: type) -> None:
    assert isinstance(make_attention(KVPool(KVGeometry(1, 1, 8, dtype, 4), 4, CPU), 1), backend)
