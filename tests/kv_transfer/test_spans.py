"""Which bytes a transfer moves."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from kvrelay.kv_transfer.byte_runs import PoolLayout, pair_spans
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool


def make_pool(order: PageOrder, pages: int) -> tuple[KVPool, PoolLayout]:
    geometry = KVGeometry(2, 2, 4, torch.float32, 3, order)
    pool = KVPool(geometry, pages, torch.device("cpu"))
    return pool, PoolLayout(geometry, pages, 0, 0, "DRAM")


@given(
    orders=st.tuples(st.sampled_from(PageOrder), st.sampled_from(PageOrder)),
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 11)), unique_by=lambda p: p[0]),
)
def test_copying_the_spans_copies_the_pages(
    orders: tuple[PageOrder, PageOrder], pairs: list[tuple[int, int]]
) -> None:
    target, local = make_pool(orders[0], 10)
    source, remote = make_pool(orders[1], 12)
    source.data.copy_(torch.randn_like(source.data))
    local_pages = np.array([p for p, _ in pairs], np.int64)
    remote_pages = np.array([p for _, p in pairs], np.int64)
    spans = pair_spans(local, local_pages, remote, remote_pages)
    assert spans.nbytes == len(pairs) * local.geometry.page_bytes
    into = target.data.flatten().view(torch.uint8).numpy()
    out_of = source.data.flatten().view(torch.uint8).numpy()
    for to, fro, length in zip(spans.local, spans.remote, spans.lengths, strict=True):
        into[to : to + length] = out_of[fro : fro + length]
    expected = torch.zeros_like(target.data)
    for layer in range(2):
        for here, there in pairs:
            assert torch.equal(target.layer(layer)[here], source.layer(layer)[there])
    untouched = [page for page in range(10) if page not in local_pages]
    for layer in range(2):
        assert torch.equal(
            target.layer(layer)[untouched], expected[:1].new_zeros(len(untouched), 2, 2, 3, 4)
        )


def test_neighbours_are_one_span() -> None:
    _, local = make_pool(PageOrder.PAGE_FIRST, 10)
    _, remote = make_pool(PageOrder.PAGE_FIRST, 10)
    spans = pair_spans(local, np.arange(2, 8), remote, np.arange(4, 10))
    assert len(spans.lengths) == 1
    spans = pair_spans(local, np.array([2, 3, 5]), remote, np.array([4, 5, 6]))
    assert len(spans.lengths) == 2


def test_page_outside_of_the_pool_is_refused() -> None:
    _, layout = make_pool(PageOrder.PAGE_FIRST, 10)
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        pair_spans(layout, np.array([0]), layout, np.array([10]))
