"""How FlashInfer is told to divide a sequence's KV, by a double that refuses what kernels do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.flashinfer_attention import FlashInfer, FlashInferAttention
from kvrelay.model_runner.attention.kv_splits import FIXED_TOKENS, KVSplits
from kvrelay.model_runner.config.cuda_graphs import GraphRoom, GraphSizes
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError
from tests.known import known
from tests.model_runner.test_attention import make_pool
from tests.model_runner.test_flashinfer_attention import (
    CPU,
    GEOMETRY,
    HEADS,
    LATENT,
    LATENT_HEADS,
    batch_of,
    use_double,
)

PIECE = FIXED_TOKENS // GEOMETRY.page_size


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def told(
    splits: KVSplits, lengths: list[tuple[int, int]], geometry: KVGeometry = GEOMETRY
) -> object:
    """What a step tells its kernels: pages of each piece, and whether nothing is divided."""
    batch = batch_of(lengths, geometry)
    backend = FlashInferAttention(FlashInfer(CPU, splits), make_pool(geometry, batch, 20), HEADS)
    backend.plan(batch, batch.page_tables[0])
    [used] = [one for one in backend.wrappers if one.plans]  # type: ignore[attr-defined]
    return used.splits  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [[(1, 20), (1, 3)], [(5, 20), (1, 3)]])
def test_by_default_the_batch_decides(lengths: list[tuple[int, int]]) -> None:
    assert told(KVSplits(), lengths) == (None, False)
    assert told(KVSplits(graphs=True), lengths) == (None, False)


def test_pieces_are_fixed_in_every_step() -> None:
    """Of decode by kernels with tensor cores, which two query heads a KV head would not have."""
    fixed = KVSplits(AttentionSplits.FIXED)
    assert told(fixed, [(1, 20), (1, 3)]) == (PIECE, False)
    assert told(fixed, [(5, 20), (1, 3)]) == (PIECE, False)
    large = replace(GEOMETRY, page_size=2 * FIXED_TOKENS)
    assert told(fixed, [(1, 20)], large) == (1, False)


def test_with_graphs_decode_is_never_divided() -> None:
    """Without a graph, too: a step that is too large for one has the same sums."""
    fixed = KVSplits(AttentionSplits.FIXED, graphs=True)
    assert told(fixed, [(1, 20), (1, 3)]) == (None, True)
    assert told(fixed, [(5, 20), (1, 3)]) == (PIECE, False)


@pytest.mark.parametrize(
    ("choice", "geometry", "heads", "message"),
    [
        ("torch", GEOMETRY, HEADS, "--attention-splits fixed needs --attention flashinfer"),
        ("auto", GEOMETRY, HEADS, "--attention-splits fixed needs --attention flashinfer"),
        ("flashinfer", LATENT, LATENT_HEADS, r"--attention-splits fixed: .* latents \(MLA\)"),
    ],
)
def test_what_cannot_be_told_is_refused(
    choice: str, geometry: KVGeometry, heads: QueryHeads, message: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=message):
        AttentionFactory(
            AttentionChoice(choice),
            [geometry],
            torch.bfloat16,
            heads,
            CPU,
            splits=AttentionSplits.FIXED,
        )


def test_the_factory_knows_of_graphs() -> None:
    room = GraphRoom(GraphSizes((1, 2)), max_tokens=64)
    for graph_room in (None, room):
        factory = AttentionFactory(
            AttentionChoice.FLASHINFER,
            [GEOMETRY],
            torch.bfloat16,
            HEADS,
            CPU,
            graph_room=graph_room,
            splits=AttentionSplits.FIXED,
        )
        flashinfer = known(factory._flashinfer)
        assert flashinfer.splits == KVSplits(AttentionSplits.FIXED, graph_room is not None)
