"""Pages as tensors and as bytes are the same thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import HUGE_PAGE, KVPool


def make_geometry(order: PageOrder, page_size: int = 4) -> KVGeometry:
    return KVGeometry(3, 2, 8, torch.float32, page_size, order)


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_piece_offsets_find_each_layers_page(order, page_size):
    geometry = make_geometry(order, page_size)
    pool = KVPool(geometry, 5, torch.device("cpu"))
    for layer in range(3):
        for page in range(5):
            pool.layer(layer)[page].fill_(100 * layer + page)
    raw = pool.data.flatten().view(torch.uint8).numpy()
    offsets = geometry.piece_offsets(np.array([4, 0, 2]), 5)
    assert offsets.shape == (3, 3)
    for row, page in enumerate([4, 0, 2]):
        for layer in range(3):
            start = offsets[row, layer]
            piece = raw[start : start + geometry.layer_page_bytes].view(np.float32)
            assert (piece == 100 * layer + page).all()


def test_pool_is_exactly_its_pages():
    for order in PageOrder:
        geometry = make_geometry(order)
        pool = KVPool(geometry, 7, torch.device("cpu"))
        assert pool.nbytes == 7 * geometry.page_bytes
        assert pool.layer(1).shape == (7, 2, 2, 4, 8)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_empty_dimension_is_named(field):
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "page_size": 1,
        field: 0,
    }
    with pytest.raises(ValueError, match=field):
        KVGeometry(dtype=torch.float32, **sizes)


def test_pools_are_named_for_what_they_hold():
    full = make_geometry(PageOrder.PAGE_FIRST)
    latent = replace(full, num_kv_heads=1, latent=True)
    kinds = [full, replace(full, window=8), latent]
    assert [kind.pool_name for kind in kinds] == ["full", "window", "latent"]
    drafts = [replace(kind, draft=True) for kind in kinds]
    assert [kind.pool_name for kind in drafts] == ["draft_full", "draft_window", "draft_latent"]
    # However alike: what a draft model wrote is not for its target.
    assert not full.holds_same_tokens_as(drafts[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", list(PageOrder))
def test_a_pool_is_zeroed_and_begins_with_a_huge_page(order, dtype):
    pool = KVPool(KVGeometry(3, 2, 8, dtype, 4, order), 5, torch.device("cpu"))
    assert pool.address % HUGE_PAGE == pool.data.storage_offset() == 0
    assert pool.nbytes == 5 * pool.geometry.page_bytes
    assert pool.data.is_contiguous()
    assert not pool.data.view(torch.uint8).any()
