"""FlashInfer is told not to divide a sequence's KV, by a double that knows which kernels can be."""

from __future__ import annotations

import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError
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


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def make_factory(
    splits: AttentionSplits,
    choice: str = "flashinfer",
    geometry: KVGeometry = GEOMETRY,
    heads: QueryHeads = HEADS,
) -> AttentionFactory:
    return AttentionFactory(
        AttentionChoice(choice), [geometry], torch.bfloat16, heads, CPU, splits=splits
    )


@pytest.mark.parametrize("splits", AttentionSplits)
@pytest.mark.parametrize("lengths", [[(1, 20), (1, 3)], [(5, 20), (1, 3)]], ids=["decode", "chunk"])
def test_every_kind_of_step_is_told(
    splits: AttentionSplits, lengths: list[tuple[int, int]]
) -> None:
    """Of decode kernels with tensor cores, which two query heads a KV head would not have."""
    batch = batch_of(lengths, GEOMETRY)
    backend = make_factory(splits).make(make_pool(GEOMETRY, batch, 20))
    assert isinstance(backend, FlashInferAttention)
    backend.plan(batch, batch.page_tables[0])
    [used] = [one for one in backend.wrappers if one.plans]  # type: ignore[attr-defined]
    assert used.divides == (splits is AttentionSplits.BATCH)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choice", "geometry", "heads", "message"),
    [
        ("torch", GEOMETRY, HEADS, "--attention-splits none needs --attention flashinfer"),
        ("auto", GEOMETRY, HEADS, "--attention-splits none needs --attention flashinfer"),
        ("flashinfer", LATENT, LATENT_HEADS, r"--attention-splits none: .* latents \(MLA\)"),
    ],
)
def test_what_cannot_be_told_is_refused(
    choice: str, geometry: KVGeometry, heads: QueryHeads, message: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=message):
        make_factory(AttentionSplits.NONE, choice, geometry, heads)
