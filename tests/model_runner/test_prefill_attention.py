"""Chunks of prompts on a CPU, tile by tile: shapes, precision, and that no row sees its neighbours.

All on both kinds of units: pairs of bfloat16 where the processor has their products, by its tiles
and by its vectors, and float32, which is what other processors compute with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvrelay.cpu_kernels.attention.prefill_attention import Strip, find_tile
from kvrelay.cpu_kernels.attention.prefill_lanes import ROWS, VECTORS
from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.cpu_kernels.lanes import LANES
from kvrelay.cpu_kernels.processor import has_bfloat16_products
from kvrelay.cpu_kernels.products.tiles import TILE_NUMBERS, may_use_tiles
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import cpu_attention
from kvrelay.model_runner.attention.cpu_attention import TILES, CpuAttention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.query_heads import QueryHeads
from tests.model_runner.test_attention import (
    agrees_with_torch,
    make_batch,
    make_pool,
    make_rows,
)
from tests.pairwise import share

CHUNKS = [(60, 60), (70, 200), (33, 290), (200, 201)]
SHAPES: dict[str, tuple[int, int, int, int, int | None, float | None]] = {
    # query heads, heads of keys and values, head_dim, page size, window, softcap
    "smollm2": (9, 3, 64, 16, None, None),
    "qwen2, groups of 7": (14, 2, 64, 16, None, None),
    "gemma2, 256 wide, window and softcap": (8, 4, 256, 16, 100, 50.0),
    "gemma3, pages of 3": (4, 1, 256, 3, 33, None),
    "pages of 1": (4, 4, 80, 1, None, None),
    "more heads than a tile has rows": (60, 1, 18, 128, None, None),
    "an odd width, a window of 1": (5, 5, 9, 5, 1, None),
    "the narrowest": (2, 1, 2, 64, 128, 0.5),
    "three tiles wide, pages of 5": (6, 2, 96, 5, 40, None),
    "pages of half a tile": (4, 4, 64, 8, None, None),
    "pages of three tiles": (4, 2, 32, 48, None, None),
}
UNITS = ["tiles", "pairs", "float32"]


@pytest.fixture(params=UNITS)
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "float32":
        monkeypatch.setattr(cpu_attention, "has_bfloat16_products", lambda: False)
    elif not has_bfloat16_products():
        pytest.skip("this processor has no AVX512-BF16")
    if request.param != "tiles":
        monkeypatch.setattr(cpu_attention, "may_use_tiles", lambda: False)
    elif not may_use_tiles():
        pytest.skip("this processor has no AMX")
    kind: str = request.param
    return kind


def are_in_tiles(geometry: KVGeometry, heads: QueryHeads) -> bool:
    return CpuAttention(KVPool(geometry, 1, torch.device("cpu")), heads).in_tiles


@pytest.mark.parametrize(("shape", "units"), share(SHAPES, UNITS, one_in=3), indirect=["units"])
def test_shapes(shape: str, units: str) -> None:
    num_heads, kv_heads, head_dim, page_size, window, softcap = SHAPES[shape]
    geometry = KVGeometry(2, kv_heads, head_dim, torch.bfloat16, page_size, window=window)
    heads = QueryHeads(num_heads, head_dim, head_dim**-0.5, softcap)
    assert are_in_tiles(geometry, heads) == (units == "tiles" and head_dim % TILE_NUMBERS == 0)
    agrees_with_torch(geometry, heads, CHUNKS)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    agrees_with_torch(KVGeometry(2, 3, 64, dtype, 16), QueryHeads(9, 64, 0.125), CHUNKS)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(72, 64), (96, 64), (576, 512)])
def test_a_latent_is_its_own_value(head_dim: int, value_dim: int, units: str) -> None:
    geometry = KVGeometry(2, 1, head_dim, torch.bfloat16, 16, latent=True)
    heads = QueryHeads(16, value_dim, 0.1)
    assert are_in_tiles(geometry, heads) == (units == "tiles" and head_dim % TILE_NUMBERS == 0)
    agrees_with_torch(geometry, heads, CHUNKS)


RAGGED_TOKENS = (5, 6, 11, 16, 17, 18, 21, 22, 32, 33, 37, 54)
RAGGED = [(n, n + before) for n in RAGGED_TOKENS for before in (0, 5, 190)]
"""Of 3 query heads that share keys and values these have 15 to 162 rows: 1 to 11 vectors."""


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "page_size", "window", "softcap", "dtype"),
    [
        pytest.param(6, 2, 64, 16, None, None, torch.bfloat16, id="groups of 3"),
        pytest.param(3, 3, 64, 16, 40, None, torch.bfloat16, id="no groups, window"),
        pytest.param(4, 2, 256, 16, 130, 50.0, torch.bfloat16, id="gemma's"),
        pytest.param(
            *(3, 1, 20, 5, 7, 0.5, torch.float16), id="float16, pages of 5", marks=pytest.mark.slow
        ),
        pytest.param(3, 1, 24, 1, None, None, torch.float32, id="float32, pages of 1"),
    ],
)
def test_chunks_of_any_number_of_vectors(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    geometry = KVGeometry(2, kv_heads, head_dim, dtype, page_size, window=window)
    agrees_with_torch(geometry, QueryHeads(num_heads, head_dim, head_dim**-0.5, softcap), RAGGED)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_strips_have_each_row_once_and_no_vector_without(threads: int) -> None:
    """Also of chunks together, and no strip is much shorter than another of its chunk."""
    geometry = KVGeometry(1, 2, 64, torch.bfloat16, 16)
    pool = KVPool(geometry, 1, torch.device("cpu"))
    attention = CpuAttention(pool, QueryHeads(6, 64, 1.0), threads=KernelThreads(threads))
    lengths = [(n, n + 9) for n in (*range(5, 90), 200, 341, 1000)]
    batch = make_batch(lengths, geometry, 100_000)
    strips = attention.plan(batch, batch.page_tables[0]).strips
    for sequence, (tokens, _) in enumerate(lengths):
        own = strips[strips[:, 0] == sequence]
        own = own[own[:, 3].argsort()]
        begins, counts = own[:, 3], own[:, 4]
        assert [0, *np.cumsum(counts)] == [*begins, 3 * tokens]
        vectors = -(-counts // LANES)
        assert vectors.sum() == -(-3 * tokens // LANES)
        assert vectors.max() <= TILES * VECTORS
        assert np.ptp(vectors) <= 1


@pytest.mark.parametrize("vectors", range(1, TILES * VECTORS + 1))
def test_tiles_have_as_many_vectors_or_one_less(vectors: int) -> None:
    """17 tokens of 3 heads are 2 tiles of 2, not of 3: vectors without rows cost as much."""
    tiles = -(-vectors // VECTORS)
    strip = Strip(vectors, tiles, 0, 0, 0, 0)
    bounds = [find_tile.py_func(strip, tile) for tile in range(tiles + 1)]  # type: ignore[attr-defined]
    assert (bounds[0], bounds[-1]) == (0, vectors)
    assert np.ptp(np.diff(bounds)) <= 1 <= np.diff(bounds).min()


def by_sdpa(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Of ``[T, 9 + 3 + 3 heads, D]``, one sequence from its first token on."""
    queries, keys, values = torch.split(rows.transpose(0, 1)[None], [9, 3, 3], dim=1)
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("scale", [0.125, 1.0], ids=["flat", "peaked"])
def test_errors_are_as_small_as_those_of_torch(scale: float) -> None:
    """Against float64. Peaked scores would show it if they were rounded to bfloat16."""
    geometry = KVGeometry(1, 3, 64, torch.bfloat16, 16)
    batch = make_batch([(300, 300)], geometry, 20)
    torch.manual_seed(3)
    pool = KVPool(geometry, 20, torch.device("cpu"))
    heads = QueryHeads(9, 64, scale)
    rows = make_rows(batch, geometry, heads)
    got = CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(0, rows)
    exact, torchs = by_sdpa(rows.double(), scale), by_sdpa(rows, scale)
    error, torchs_error = ((one.double() - exact).abs().mean() for one in (got, torchs))
    assert error <= 1.1 * torchs_error


def part_of(batch: ForwardBatch, sequence: int, a: int, b: int) -> tuple[ForwardBatch, slice]:
    """The new tokens ``[a, b)`` of a sequence of `batch` as a batch, and which rows they are."""
    start = int(batch.query_start[sequence])
    rows = slice(start + a, start + b)
    last = int(batch.positions[start + b - 1])
    table = batch.page_tables[0][sequence : sequence + 1]
    part = replace(
        batch,
        positions=batch.positions[rows],
        query_start=np.array([0, b - a], np.int32),
        seq_lens=np.array([last + 1], np.int32),
        page_tables=(table,),
    )
    return part, rows


@pytest.fixture
def team_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_attention, "SHARED_PRODUCTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("team_of_two", "units")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("head_dim", "page_size"), [(20, 5), (64, 16), (96, 5)])
def test_a_row_depends_neither_on_the_chunk_nor_on_the_batch(
    window: int | None, dtype: torch.dtype, head_dim: int, page_size: int
) -> None:
    """To the last bit: 3 sequences by two threads, and one of them chunk by chunk by one."""
    geometry = KVGeometry(1, 2, head_dim, dtype, page_size, window=window)
    heads = QueryHeads(10, head_dim, 0.3, 30.0)
    lengths = [(260, 260), (300, 420), (17, 600)]
    total = 3 * geometry.pages_for(600)
    batch = make_batch(lengths, geometry, total)
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, total), make_rows(batch, geometry, heads)
    both = CpuAttention(pool, heads)
    together = both.plan(batch, batch.page_tables[0]).attend(0, rows)
    alone = CpuAttention(pool, heads, threads=KernelThreads(1))
    alone.few_tokens = 0
    for a, b in pairwise([0, 1, 3, 20, 150, 151, 300]):
        part, which = part_of(batch, 1, a, b)
        got = alone.plan(part, part.page_tables[0]).attend(0, rows[which])
        assert torch.equal(got, together[which])


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("num_heads", [3, 9])
def test_small_chunks_of_a_prompt_have_the_bits_of_large_ones(num_heads: int) -> None:
    """From 5 tokens on where 3 query heads share keys and values, as soon where more do.

    Also if several choices continue a prompt: each asks for the logits of its last token.
    """
    geometry, heads = KVGeometry(1, 1, 64, torch.bfloat16, 16), QueryHeads(num_heads, 64, 0.3)
    batch = make_batch([(100, 150)], geometry, 10)
    torch.manual_seed(0)
    pool, rows = make_pool(geometry, batch, 10), make_rows(batch, geometry, heads)
    attention = CpuAttention(pool, heads)
    whole = attention.plan(batch, batch.page_tables[0]).attend(0, rows)
    for a, b in pairwise([0, 5, 12, 28, 60, 76, 94, 100]):
        part, which = part_of(batch, 0, a, b)
        part = replace(part, logit_rows=np.full(16, b - a - 1))
        got = attention.plan(part, part.page_tables[0]).attend(0, rows[which])
        assert torch.equal(got, whole[which])


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("head_dim", [8, 32])
def test_nan_is_not_hidden_and_does_not_spread(head_dim: int) -> None:
    geometry = KVGeometry(1, 1, head_dim, torch.bfloat16, 4)
    heads = QueryHeads(1, head_dim, 1.0)
    batch = make_batch([(100, 100)], geometry, 25)
    pool, rows = KVPool(geometry, 25, torch.device("cpu")), make_rows(batch, geometry, heads)
    rows[40, 0, 3] = torch.nan
    got = CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(0, rows)
    assert got[40].isnan().all()
    assert not torch.cat((got[:40], got[41:])).isnan().any()


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_what_is_not_finite_reaches_no_earlier_tile(
    part: str, broken: float, head_dim: int
) -> None:
    """A value reaches the rows of its own tile; a key only those that see it.

    It lies beyond the 32 tokens that the processor's tiles multiply at once.
    """
    geometry = KVGeometry(1, 1, head_dim, torch.bfloat16, 4)
    heads = QueryHeads(1, head_dim, 1.0)
    batch = make_batch([(100, 100)], geometry, 25)
    torch.manual_seed(0)
    pool, rows = KVPool(geometry, 25, torch.device("cpu")), make_rows(batch, geometry, heads)
    attention, at = CpuAttention(pool, heads), ROWS + 22
    expected = attention.plan(batch, batch.page_tables[0]).attend(0, rows)
    rows[at, 1 if part == "key" else 2, 3] = broken
    got = attention.plan(batch, batch.page_tables[0]).attend(0, rows)
    reached = at if part == "key" else ROWS
    assert torch.equal(got[:reached], expected[:reached])
    # A row may have no weight for a key whose score is infinite.
    assert part == "key" or not got[at].isfinite().all()


@pytest.mark.usefixtures("units")
def test_large_scores_do_not_overflow() -> None:
    geometry = KVGeometry(1, 1, 32, torch.bfloat16, 4)
    heads = QueryHeads(1, 32, 1.0)
    batch = make_batch([(100, 100)], geometry, 25)
    pool, rows = KVPool(geometry, 25, torch.device("cpu")), make_rows(batch, geometry, heads)
    rows[:, 0], rows[:, 1] = 100, rows[:, 1] * 1000
    got = CpuAttention(pool, heads).plan(batch, batch.page_tables[0]).attend(0, rows)
    largest = (rows[:, 1].float().sum(1)).cummax(0).indices
    torch.testing.assert_close(got, rows[largest, 2])
