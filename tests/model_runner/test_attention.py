"""The compiled backend agrees with the one in plain torch, and that one with a plain formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import torch_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.query_heads import QueryHeads

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = [(1, 700), (4, 9), (1, 1), (1, 16), (20, 20), (1, 500), (300, 310), (1, 17), (40, 90)]
GROUPED = KVGeometry(2, 3, 24, torch.float32, 5)
PLAIN = QueryHeads(6, 24, 24**-0.5)
KINDS = {
    "full": (GROUPED, PLAIN),
    "window": (replace(GROUPED, window=16), PLAIN),
    "window-of-1": (replace(GROUPED, window=1), PLAIN),
    "softcap": (GROUPED, replace(PLAIN, softcap=0.7)),
    "softcap-window": (replace(GROUPED, window=33), replace(PLAIN, softcap=0.7)),
    "latent": (
        KVGeometry(2, 1, 40, torch.float32, 5, latent=True),
        QueryHeads(6, 24, 0.3),
    ),
}


def make_batch(
    lengths: list[tuple[int, int]], geometry: KVGeometry, total_pages: int
) -> ForwardBatch:
    """Sequences of (new tokens, tokens in all), on shuffled pages; -1 below the window."""
    new = [n for n, _ in lengths]
    pages_each = max(geometry.pages_for(all_) for _, all_ in lengths)
    pages = np.random.default_rng(2).permutation(total_pages)[: len(lengths) * pages_each]
    table = pages.reshape(len(lengths), pages_each).astype(np.int32)
    query_start = np.cumsum([0, *new]).astype(np.int32)
    for (n, all_), row in zip(lengths, table, strict=True):
        row[geometry.pages_for(all_) :] = -1
        if geometry.window is not None:
            row[: max(0, all_ - n - geometry.window + 1) // geometry.page_size] = -1
    return ForwardBatch(
        input_ids=np.zeros(query_start[-1], np.int64),
        positions=np.concatenate([np.arange(all_ - n, all_) for n, all_ in lengths]),
        query_start=query_start,
        seq_lens=np.array([all_ for _, all_ in lengths], np.int32),
        page_tables=(table,),
        logit_rows=np.empty(0, np.int64),
    )


def make_pool(geometry: KVGeometry, batch: ForwardBatch, total_pages: int) -> KVPool:
    """Random where the batch may read, NaN elsewhere."""
    pool = KVPool(geometry, total_pages, CPU)
    pool.data.fill_(torch.nan)
    (table,) = batch.page_tables
    for layer in range(geometry.num_layers):
        pages = pool.layer(layer)[table[table >= 0]]
        pool.layer(layer)[table[table >= 0]] = torch.randn(pages.shape).to(pages.dtype)
    return pool


def precise_copy_of(pool: KVPool) -> KVPool:
    copy = KVPool(replace(pool.geometry, dtype=torch.float32), pool.total_pages, CPU)
    for layer in range(pool.geometry.num_layers):
        copy.layer(layer).copy_(pool.layer(layer))
    return copy


def agrees_with_torch(
    geometry: KVGeometry,
    heads: QueryHeads,
    lengths: list[tuple[int, int]],
    sinks: torch.Tensor | None = None,
) -> None:
    """The CPU's results, and what it wrote, are those of torch in float32."""
    longest = max(all_ for _, all_ in lengths)
    total = len(lengths) * geometry.pages_for(longest) + 3
    batch = make_batch(lengths, geometry, total)
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, total), make_rows(batch, geometry, heads)
    precise = precise_copy_of(pool)
    (table,) = batch.page_tables
    got = CpuAttention(pool, heads).plan(batch, table).attend(1, rows, sinks)
    expected = TorchAttention(precise, heads).plan(batch, table).attend(1, rows.float(), sinks)
    tolerance = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    assert got.dtype is geometry.dtype
    written = precise_copy_of(pool).data
    assert torch.equal(written.nan_to_num(7), precise.data.nan_to_num(7))


def make_rows(batch: ForwardBatch, geometry: KVGeometry, heads: QueryHeads) -> torch.Tensor:
    count = heads.num_heads + geometry.parts * geometry.num_kv_heads
    return torch.randn(len(batch.positions), count, geometry.head_dim).to(geometry.dtype)


def attend_by_formula(
    pool: KVPool,
    heads: QueryHeads,
    batch: ForwardBatch,
    rows: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token by token, from layer 1 of a pool that has the new tokens."""
    geometry, layer = pool.geometry, pool.layer(1)
    (table,) = batch.page_tables
    group = heads.num_heads // geometry.num_kv_heads
    owners = np.repeat(np.arange(len(table)), np.diff(batch.query_start))
    results = []
    for row, owner, position in zip(rows, owners, batch.positions, strict=True):
        first = 0 if geometry.window is None else max(0, position - geometry.window + 1)
        seen = np.arange(first, position + 1)
        pages, slots = table[owner, seen // geometry.page_size], seen % geometry.page_size
        vectors = layer[pages, :, :, slots]  # [seen, parts, kv_heads, head_dim]
        for head in range(heads.num_heads):
            keys, values = vectors[:, 0, head // group], vectors[:, -1, head // group]
            scores = keys @ row[head] * heads.scale
            if heads.softcap is not None:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            results.append(scores.softmax(0)[: len(seen)] @ values[:, : heads.value_dim])
    return torch.stack(results).view(len(owners), -1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_agrees_with_the_formula(
    kind: str, page_size: int, order: PageOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks shorter than a chunk, as a long one's are.
    monkeypatch.setattr(torch_attention, "MIN_BLOCK_TOKENS", 10)
    geometry, heads = KINDS[kind]
    geometry = replace(geometry, page_size=page_size, order=order)
    lengths = [(1, 1), (7, 7), (1, 40), (50, 60), (1, 17), (3, 36), (2, 2)]
    total = 7 * geometry.pages_for(60) + 3
    batch = make_batch(lengths, geometry, total)
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, total), make_rows(batch, geometry, heads)
    got = TorchAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(1, rows)
    torch.testing.assert_close(got, attend_by_formula(pool, heads, batch, rows))


SINKS = torch.tensor([0.3, -2.0, 1.5, 200.0, -200.0, 4.0])
"""Scores beside those of tokens, far above and far below them, too."""


@pytest.mark.parametrize("kind", ["full", "softcap-window"])
def test_torch_agrees_with_the_formula_beside_sinks(kind: str) -> None:
    geometry, heads = KINDS[kind]
    lengths = [(1, 1), (7, 7), (1, 40), (50, 60)]
    batch = make_batch(lengths, geometry, 60)
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, 60), make_rows(batch, geometry, heads)
    got = TorchAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(1, rows, SINKS)
    torch.testing.assert_close(got, attend_by_formula(pool, heads, batch, rows, SINKS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "softcap-window"])
def test_cpu_agrees_with_torch_beside_sinks(kind: str, dtype: torch.dtype) -> None:
    geometry, heads = KINDS[kind]
    agrees_with_torch(replace(geometry, dtype=dtype), heads, LENGTHS, SINKS)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_agrees_with_torch(
    kind: str, dtype: torch.dtype, page_size: int, order: PageOrder
) -> None:
    geometry, heads = KINDS[kind]
    geometry = replace(geometry, page_size=page_size, order=order, dtype=dtype)
    agrees_with_torch(geometry, heads, LENGTHS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 5, 7])
@pytest.mark.parametrize("head_dim", [5, 16, 80, 96])
def test_decode_agrees_with_torch_for_any_number_of_heads_and_dimensions(
    head_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Heads are computed by up to four, dimensions by 64, 16 and one."""
    geometry = KVGeometry(2, 2, head_dim, dtype, 6)
    heads = QueryHeads(2 * group, head_dim, head_dim**-0.5)
    agrees_with_torch(geometry, heads, [(1, 40), (1, 1), (1, 5), (1, 23)])


PAIRS = [
    # query heads, heads of keys and values, dimensions, page size, window, softcap
    pytest.param(9, 3, 64, 16, None, None, id="smollm2"),
    pytest.param(7, 1, 64, 16, None, None, id="a group of 7"),
    pytest.param(6, 3, 64, 32, 40, None, id="groups of 2, pages of two blocks, window"),
    pytest.param(4, 4, 128, 16, 33, 0.7, id="no groups, window and softcap"),
    pytest.param(10, 2, 256, 64, None, 50.0, id="groups of 5, gemma's"),
    pytest.param(6, 2, 64, 5, 50, None, id="pages of 5, window"),
    pytest.param(6, 2, 64, 1, 1, None, id="pages of 1, a window of 1"),
    pytest.param(6, 2, 64, 48, 16, None, id="a window of a block"),
]


@pytest.mark.skipif(not has_bfloat16_products(), reason="no AVX512-BF16")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "page_size", "window", "softcap"), PAIRS
)
def test_decode_in_pairs_agrees_with_torch(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Blocks that are read in place and copied ones, whose unseen tokens are NaN."""
    geometry = KVGeometry(2, kv_heads, head_dim, torch.bfloat16, page_size, window=window)
    heads = QueryHeads(num_heads, head_dim, head_dim**-0.5, softcap)
    lengths = [(1, length) for length in (1, 15, 16, 17, 33, 64, 199, 700)]
    agrees_with_torch(geometry, heads, [*lengths, (5, 40)])


@pytest.mark.skipif(not has_bfloat16_products(), reason="no AVX512-BF16")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 0.7)])
def test_pairs_agree_with_torch_beside_sinks(window: int | None, softcap: float | None) -> None:
    geometry = KVGeometry(2, 3, 64, torch.bfloat16, 16, window=window)
    heads = QueryHeads(6, 64, 0.125, softcap)
    agrees_with_torch(geometry, heads, [(1, 1), (1, 17), (1, 199), (5, 40), (60, 90)], SINKS)


@pytest.mark.parametrize("order", ["every_second", "by_columns"])
def test_rows_that_are_not_contiguous_are_refused(order: str) -> None:
    geometry = KVGeometry(2, 1, 64, torch.bfloat16, 16)
    batch = make_batch([(1, 20), (1, 9)], geometry, 9)
    heads = QueryHeads(2, 64, 0.1)
    pool, rows = make_pool(geometry, batch, 9), make_rows(batch, geometry, heads)
    if order == "every_second":
        rows = rows.repeat_interleave(2, 0)[::2]
    else:
        rows = rows.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    with pytest.raises(AssertionError, match="not contiguous"):
        CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(1, rows)


@pytest.mark.parametrize("cut", [np.s_[1:], np.s_[:, 1:], np.s_[..., 2:]], ids=["T", "heads", "D"])
def test_rows_of_another_shape_are_refused(cut: Any) -> None:
    geometry = KVGeometry(2, 1, 64, torch.bfloat16, 16)
    batch = make_batch([(1, 20), (1, 9)], geometry, 9)
    heads = QueryHeads(2, 64, 0.1)
    pool, rows = make_pool(geometry, batch, 9), make_rows(batch, geometry, heads)
    with pytest.raises(AssertionError):
        CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(
            1, rows[cut].contiguous()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    geometry = KVGeometry(2, 1, 64, dtype, 16)
    batch = make_batch([(1, 20), (1, 9)], geometry, 9)
    heads = QueryHeads(2, 64, 0.1)
    pool, rows = make_pool(geometry, batch, 9), make_rows(batch, geometry, heads)
    with pytest.raises(AssertionError, match="float32"):
        CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(1, rows.float())


@pytest.mark.skipif(not has_bfloat16_products(), reason="no AVX512-BF16")
def test_latents_in_pairs_agree_with_torch() -> None:
    geometry = KVGeometry(2, 1, 192, torch.bfloat16, 16, latent=True)
    agrees_with_torch(geometry, QueryHeads(6, 128, 0.1), [(1, 40), (1, 1), (1, 80), (2, 31)])


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("window", [None, 30])
def test_decode_reads_nothing_that_it_does_not_see(
    window: int | None, head_dim: int, page_size: int
) -> None:
    """In its own pages: tokens that were there before, or are no longer in its window."""
    geometry = KVGeometry(1, 3, head_dim, torch.bfloat16, page_size, window=window)
    batch = make_batch([(1, 70), (1, 33)], geometry, 40)
    torch.manual_seed(0)
    heads = QueryHeads(9, head_dim, head_dim**-0.5)
    pool, rows = make_pool(geometry, batch, 40), make_rows(batch, geometry, heads)
    (table,) = batch.page_tables
    step = CpuAttention(pool, heads).plan(batch, table)
    expected = step.attend(0, rows)
    for page_ids, length in zip(table, batch.seq_lens, strict=True):
        tokens = np.arange(geometry.pages_for(length) * page_size)
        unseen = tokens[(tokens >= length) | (tokens < length - (window or length))]
        ids, slots = page_ids[unseen // page_size], unseen % page_size
        pool.layer(0)[ids[ids >= 0], :, :, slots[ids >= 0]] = torch.nan
    assert torch.equal(step.attend(0, rows), expected)


@pytest.mark.skipif(not has_bfloat16_products(), reason="no AVX512-BF16")
@pytest.mark.parametrize("scale", [0.125, 1.0], ids=["flat", "peaked"])
def test_errors_of_decode_in_pairs_are_as_small_as_those_of_torch(scale: float) -> None:
    """Against float64: only weights and results are rounded to bfloat16."""
    geometry = KVGeometry(1, 3, 64, torch.bfloat16, 16)
    heads = QueryHeads(9, 64, scale)
    batch = make_batch([(1, length) for length in range(1, 800, 13)], geometry, 3200)
    torch.manual_seed(3)
    pool, rows = make_pool(geometry, batch, 3200), make_rows(batch, geometry, heads)
    wide = KVPool(replace(geometry, dtype=torch.float64), 3200, CPU)
    wide.layer(0).copy_(pool.layer(0))
    (table,) = batch.page_tables
    got = CpuAttention(pool, heads).plan(batch, table).attend(0, rows)
    torchs = TorchAttention(pool, heads).plan(batch, table).attend(0, rows)
    exact = TorchAttention(wide, heads).plan(batch, table).attend(0, rows.double())
    error, torchs_error = ((one.double() - exact).abs().mean() for one in (got, torchs))
    assert error <= 1.1 * torchs_error


@pytest.mark.slow  # its kernels take half a minute to compile, and few compute in float16 on a CPU
@pytest.mark.parametrize("kind", ["full", "window"])
def test_float16_agrees_with_torch(kind: str) -> None:
    geometry, heads = KINDS[kind]
    agrees_with_torch(replace(geometry, dtype=torch.float16), heads, LENGTHS)


def are_computed_as_in_decode(kind: str, dtype: torch.dtype, tokens: int, drafts: int) -> None:
    """`tokens` new ones, of which the last `drafts` and the one before them have logits."""
    geometry, heads = KINDS[kind]
    geometry = replace(geometry, dtype=dtype)
    batch = make_batch([(tokens, 40)], geometry, 20)
    batch = replace(batch, logit_rows=np.arange(tokens - drafts - 1, tokens))
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, 20), make_rows(batch, geometry, heads)
    backend = CpuAttention(pool, heads)
    together = backend.plan(batch, batch.page_tables[0]).attend(1, rows)
    for index, position in enumerate(batch.positions):
        one = replace(
            batch,
            positions=batch.positions[index : index + 1],
            query_start=np.array([0, 1], np.int32),
            seq_lens=np.array([position + 1], np.int32),
            logit_rows=np.array([0]),
        )
        alone = backend.plan(one, one.page_tables[0]).attend(1, rows[index : index + 1])
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_are_computed_as_in_decode(kind: str, dtype: torch.dtype) -> None:
    """To the last bit: drafts are verified by what plain decoding would compute."""
    are_computed_as_in_decode(kind, dtype, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "latent"])
def test_many_drafts_are_computed_as_in_decode(kind: str, dtype: torch.dtype) -> None:
    """More than a prompt's chunk may have tokens for that."""
    are_computed_as_in_decode(kind, dtype, 16, 15)


@pytest.mark.parametrize(("head_dim", "dtype"), [(8, torch.float32), (64, torch.bfloat16)])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_scores_do_not_overflow(
    softcap: float | None, head_dim: int, dtype: torch.dtype
) -> None:
    geometry = KVGeometry(1, 1, head_dim, dtype, 4)
    heads = QueryHeads(1, head_dim, 1.0, softcap)
    pool = KVPool(geometry, 4, CPU)
    pool.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(100)
    batch = make_batch([(1, 10)], geometry, 4)
    rows = torch.full((1, 3, head_dim), 50.0, dtype=dtype)
    got = CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(0, rows)
    expected = TorchAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(0, rows)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_nan_is_not_hidden(softcap: float | None, head_dim: int) -> None:
    geometry = KVGeometry(1, 1, head_dim, torch.bfloat16, 4)
    pool = KVPool(geometry, 4, CPU)
    rows = torch.ones(1, 3, head_dim, dtype=torch.bfloat16)
    rows[0, 0, 3] = torch.nan
    batch = make_batch([(1, 10)], geometry, 4)
    backend = CpuAttention(pool, QueryHeads(1, head_dim, 1.0, softcap))
    assert backend.plan(batch, batch.page_tables[0]).attend(0, rows).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.bfloat16, CpuAttention),
        (torch.float32, CpuAttention),
        (torch.float16, CpuAttention),
        (torch.float64, TorchAttention),
    ],
)
def test_backend_by_dtype(dtype: torch.dtype, backend: type) -> None:
    geometry, heads = KVGeometry(1, 1, 8, dtype, 4), QueryHeads(1, 8, 1.0)
    factory = AttentionFactory(AttentionChoice.AUTO, [geometry], geometry.dtype, heads, CPU)
    assert isinstance(factory.make(KVPool(geometry, 4, CPU)), backend)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_no_more_threads_are_started_than_there_are_rows(rows: int) -> None:
    geometry = KVGeometry(2, 1, 16, torch.float32, 16)
    lengths = [(1, 2000)] * rows
    num_pages = rows * geometry.pages_for(2000) + 3
    batch = make_batch(lengths, geometry, num_pages)
    pool = make_pool(geometry, batch, num_pages)
    attention = CpuAttention(pool, QueryHeads(2, 16, 0.25), threads=KernelThreads(4))
    step = attention.plan(batch, batch.page_tables[0])
    assert step.decode_threads == min(rows, 4)
