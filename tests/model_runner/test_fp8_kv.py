"""KV in FP8: what is stored, what is read of it, and models whose pages are so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import fp8_pages
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.dequantized_attention import (
    DequantizedAttention,
    gather_pages,
)
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferAttention,
)
from kvrelay.model_runner.attention.fp8_pages import FP8, LARGEST, Fp8Pages
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.config.kv_scale import KVScale
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fp8_models import FORMATS, write_fp8
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_attention import KINDS, make_batch, make_rows
from tests.model_runner.test_decoder import EXPERTS, NAMES
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.test_fp8_checkpoint import rewrite
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

CPU = torch.device("cpu")
LENGTHS = [(1, 40), (7, 7), (1, 33), (30, 39)]
SCALES = (KVScale(0.5, 2.0), KVScale(0.25, 0.125))
TOTAL_PAGES = 60


def fp8_pool(geometry: KVGeometry) -> KVPool:
    """Of what FP8 can be, written without regard for scales."""
    pool = KVPool(replace(geometry, dtype=FP8), TOTAL_PAGES, CPU)
    torch.manual_seed(0)
    pool.data.copy_(torch.randn(pool.data.shape))
    return pool


def wide_pool(pool: KVPool, pages: Fp8Pages) -> KVPool:
    """The same numbers as they are read, in float32."""
    wide = KVPool(replace(pool.geometry, dtype=torch.float32), pool.total_pages, CPU)
    for layer, scale in enumerate(pages.scales):
        for part, one in enumerate((scale.key, scale.value)[: pool.geometry.parts]):
            wide.layer(layer)[:, part] = pool.layer(layer)[:, part].float() * one
    return wide


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", [AttentionChoice.CPU, AttentionChoice.TORCH])
def test_attention_is_that_over_what_pages_mean(
    kind: str, order: PageOrder, choice: AttentionChoice
) -> None:
    """New tokens included, which are read as they are stored."""
    geometry, heads = KINDS[kind]
    geometry = replace(geometry, order=order, dtype=torch.float32)
    batch = make_batch(LENGTHS, geometry, TOTAL_PAGES)
    (table,) = batch.page_tables
    pool, rows = fp8_pool(geometry), make_rows(batch, geometry, heads)
    scales = SCALES[: geometry.num_layers]
    pages = Fp8Pages(pool, scales, torch.float32)
    reference = wide_pool(pool, pages)
    factory = AttentionFactory(choice, [pool.geometry], torch.float32, heads, CPU)
    backend = factory.make(pool, scales)
    assert isinstance(backend, DequantizedAttention)
    assert type(backend.inner) is (CpuAttention if choice == "cpu" else TorchAttention)
    rounded = rows.clone()
    new = rounded[:, heads.num_heads :]
    new.copy_(pages.dequantize(1, pages.quantize(1, new)))
    expected = TorchAttention(reference, heads).plan(batch, table).attend(1, rounded)
    got = backend.plan(batch, table).attend(1, rows)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    # Each page is what the reference's has become, and no other layer was written.
    assert torch.equal(wide_pool(pool, pages).data, reference.data)


def test_scratch_pages_that_cannot_be_had_change_nothing() -> None:
    """A step ends without memory for them; those after it that need fewer are right."""
    geometry, heads = KINDS["full"]
    pool = fp8_pool(geometry)
    factory = AttentionFactory(AttentionChoice.TORCH, [pool.geometry], torch.float32, heads, CPU)
    small, large = (make_batch([(1, end)], geometry, TOTAL_PAGES) for end in (40, 200))
    rows = make_rows(small, geometry, heads)
    backend, other = (factory.make(pool, SCALES[: geometry.num_layers]) for _ in range(2))
    assert isinstance(backend, DequantizedAttention)
    backend.plan(small, small.page_tables[0]).attend(0, rows.clone())
    make, backend._make = backend._make, lambda _: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        backend.plan(large, large.page_tables[0])
    backend._make = make
    got, expected = (
        one.plan(small, small.page_tables[0]).attend(1, rows.clone()) for one in (backend, other)
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_every_number_of_fp8_is_read_as_it_is(
    dtype: torch.dtype, order: PageOrder, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = KVGeometry(2, 2, 16, FP8, 8, order)
    pool = KVPool(geometry, 5, CPU)
    pool.data.view(torch.uint8).view(-1).copy_(torch.arange(pool.data.numel()) % 256)
    pages = Fp8Pages(pool, SCALES, dtype)
    ids = np.array([4, 0, 3])
    for layer, scale in enumerate(SCALES):
        out = torch.empty(3, 2, 2, 8, 16, dtype=dtype)
        pages.read_pages(layer, ids, out)
        stored = pool.layer(layer)[ids].float()
        for part, one in enumerate((scale.key, scale.value)):
            assert out[:, part].equal((stored[:, part] * one).to(dtype)) or torch.equal(
                out[:, part].nan_to_num(7), (stored[:, part] * one).to(dtype).nan_to_num(7)
            )
        tables, pages._tables = pages._tables, None
        plain = torch.empty_like(out)
        monkeypatch.setattr(fp8_pages, "_PIECE_NUMBERS", pieces * plain[0].numel())
        pages.read_pages(layer, ids, plain)
        pages._tables = tables
        assert torch.equal(plain.nan_to_num(7), out.nan_to_num(7))


def test_scratch_is_never_more_than_the_pool() -> None:
    """Which is counted where KV gets a share of a device's memory."""
    geometry, heads = KINDS["full"]
    geometry = replace(geometry, dtype=torch.float32)
    pool = fp8_pool(geometry)
    factory = AttentionFactory(AttentionChoice.TORCH, [pool.geometry], torch.float32, heads, CPU)
    backend = factory.make(pool, SCALES[: geometry.num_layers])
    assert isinstance(backend, DequantizedAttention)
    for num_tokens in (155, 160, 300):
        batch = make_batch([(1, num_tokens)], geometry, TOTAL_PAGES)
        backend.plan(batch, batch.page_tables[0])
        assert backend.scratch.total_pages <= pool.total_pages == TOTAL_PAGES
    nbytes = backend.scratch.data.nbytes
    assert nbytes <= pool.total_pages * factory.scratch_page_bytes(pool.geometry)
    assert factory.scratch_page_bytes(geometry) == 0, "pages that are read as they are"


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    pages = Fp8Pages(
        KVPool(KVGeometry(1, 1, 4, FP8, 8), 1, CPU), [KVScale(2.0, 1.0)], torch.float32
    )
    infinite = pages.quantize(0, torch.tensor([[[torch.inf, 0, 0, 0], [0, 0, 0, -torch.inf]]]))
    assert infinite.float().isnan().sum() == 2
    new = torch.tensor([[[1000.0, -1e6, 3.0, torch.nan], [1000.0, 449.0, -3.0, 0.5]]])
    stored = pages.quantize(0, new)
    assert stored.dtype is FP8
    assert stored.float()[0, 0, :3].tolist() == [LARGEST, -LARGEST, 1.5]
    assert stored.float()[0, 0, 3].isnan()
    read = pages.dequantize(0, stored)
    assert read[0, 0, :3].tolist() == [2 * LARGEST, -2 * LARGEST, 3.0]
    assert read[0, 1].tolist() == [LARGEST, LARGEST, -3.0, 0.5]


def test_only_visible_pages_are_widened_and_each_once() -> None:
    geometry = KVGeometry(1, 2, 8, FP8, 4, window=6)
    batch = make_batch([(1, 21), (5, 9)], geometry, 40)
    table = batch.page_tables[0]
    table[1, 0] = table[0, 4]  # a prefix that both have
    ids, places = gather_pages(batch, table, geometry)
    # Of the first the tokens from 15 on, of the second all.
    wanted = [table[0, 3:6], table[1, 0:3]]
    assert ids.tolist() == sorted(set(np.concatenate(wanted).tolist()))
    assert (ids[places[0, 3:6]] == wanted[0]).all()
    assert (ids[places[1, 0:3]] == wanted[1]).all()
    assert (places[0, :3] == -1).all()
    assert (places[1, 3:] == -1).all()


@few(8)
@pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
def test_every_model_is_near_itself(name: str, models: Models, tokens: list[int]) -> None:
    """In prompts, chunks, verification and decode: 3 bits of mantissa are felt, no more."""
    runner = ModelRunner(models.folder(name), "float32", "cpu", kv_dtype=KVDtype.FP8_E4M3)
    running = Sequences(runner, 1, 60)
    assert all(pool.geometry.dtype is FP8 for pool in running.pools)
    parts = [running.forward({0: tokens[a:b]}) for a, b in [(0, 20), (20, 21), (21, 38), (38, 39)]]
    expected = models.logits(name, tokens[:39])
    errors = (torch.cat(parts) - expected).norm(dim=1) / expected.norm(dim=1)
    # The median: in these small random models some tokens go to other experts.
    assert 0 < errors.median() < 0.12


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_take_half_of_bfloat16_s_bytes(name: str, dtype: str, models: Models) -> None:
    folder = models.folder(name)
    plain = ModelRunner(folder, "bfloat16", "cpu").make_geometries(16)
    small = ModelRunner(folder, dtype, "cpu", kv_dtype=KVDtype.FP8_E4M3).make_geometries(16)
    assert [2 * one.page_bytes for one in small] == [one.page_bytes for one in plain]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "deepseek-v3"])
def test_chunks_do_not_change_what_is_read(name: str, models: Models, tokens: list[int]) -> None:
    """A new token is attended to as it will be read later: rounded."""
    runner = ModelRunner(models.folder(name), "float32", "cpu", kv_dtype=KVDtype.FP8_E4M3)
    whole = Sequences(runner, 1, 60).forward({0: tokens[:40]})
    running = Sequences(runner, 1, 60)
    parts = torch.cat([running.forward({0: tokens[a : a + 5]}) for a in range(0, 40, 5)])
    # But for sums in another order, which may round a new token to a neighbour.
    errors = (whole - parts).norm(dim=1) / whole.norm(dim=1)
    assert errors.median() < 1e-4


@pytest.mark.parametrize("form", ["fp8-static", "compressed-tensor", "compressed-channel"])
def test_scales_come_from_the_checkpoint(form: str, models: Models, tmp_path: Path) -> None:
    folder, _ = write_fp8(models.folder("llama"), FORMATS[form], tmp_path)
    runner = ModelRunner(folder, "float32", "cpu", kv_dtype=KVDtype.FP8_E4M3)
    expected = {
        "fp8-static": KVScale(0.5, 0.5),
        "compressed-tensor": KVScale(0.25, 0.125),
        "compressed-channel": KVScale(),
    }[form]
    assert runner._kv_scales == [[expected] * 2]
    # They are part of what a page's bytes mean, so of the digest.
    plain = ModelRunner(folder, "float32", "cpu")
    assert (runner.weights_digest == plain.weights_digest) == (expected == KVScale())


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_is_not_positive_is_refused(
    bad: float, models: Models, tmp_path: Path
) -> None:
    folder, _ = write_fp8(models.folder("llama"), FORMATS["compressed-tensor"], tmp_path)
    rewrite(folder, "model.layers.1.self_attn.", v_scale=torch.tensor(bad))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale must be positive"):
        ModelRunner(folder, "float32", "cpu", kv_dtype=KVDtype.FP8_E4M3)
    ModelRunner(folder, "float32", "cpu")  # it is not used there


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("kind", KINDS)
def test_flashinfer_reads_pages_by_their_scales(
    kind: str, order: PageOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_double(monkeypatch, latents_of=16)
    geometry, heads = KINDS[kind]
    geometry = replace(geometry, order=order, dtype=torch.float32)
    for lengths in (LENGTHS, [(1, 40), (1, 9)]):
        batch = make_batch(lengths, geometry, TOTAL_PAGES)
        (table,) = batch.page_tables
        pool, rows = fp8_pool(geometry), make_rows(batch, geometry, heads)
        pages = Fp8Pages(pool, SCALES, torch.float32)
        reference = wide_pool(pool, pages)
        rounded = rows.clone()
        new = rounded[:, heads.num_heads :]
        new.copy_(pages.dequantize(0, pages.quantize(0, new)))
        expected = TorchAttention(reference, heads).plan(batch, table).attend(0, rounded)
        backend = FlashInferAttention(FlashInfer(CPU), pool, heads, pages)
        got = backend.plan(batch, table).attend(0, rows)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(wide_pool(pool, pages).data, reference.data)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_models_by_flashinfer_are_those_of_torch(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a chunk whose latents are made into keys and values."""
    use_double(monkeypatch, latents_of=16)
    logits = []
    for attention in (AttentionChoice.TORCH, AttentionChoice.FLASHINFER):
        runner = ModelRunner(
            models.folder(name),
            "float32",
            "cpu",
            attention=attention,
            kv_dtype=KVDtype.FP8_E4M3,
        )
        running = Sequences(runner, 2, 60)
        steps: list[dict[int, Sequence[int]]] = [
            {0: tokens[:40], 1: tokens[:3]},
            {0: tokens[40:42], 1: tokens[3:4]},
            {0: tokens[42:43], 1: tokens[4:5]},
        ]
        logits.append(torch.cat([running.forward(step) for step in steps]))
    torch_s, flashinfer_s = logits
    errors = (torch_s - flashinfer_s).norm(dim=1) / torch_s.norm(dim=1)
    # A sum in another order may round a number to its neighbour in FP8, which is felt by others.
    assert errors.median() < 1e-4
    assert errors.max() < 0.1


TEXT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.mark.slow  # tiny models have it in `make test`
def test_smollm2_s_tokens_are_nearly_bfloat16_s(smollm2: Path) -> None:
    """After each token of a text that bfloat16 has written, without scales in the checkpoint."""
    plain = Sequences(ModelRunner(smollm2, "bfloat16", "cpu"), 1, 80, 16)
    text, new = list(TEXT), list(TEXT)
    while len(text) < 64:
        new = [int(plain.forward({0: new}, [len(new) - 1])[-1].argmax())]
        text += new
    runner = ModelRunner(smollm2, "bfloat16", "cpu", kv_dtype=KVDtype.FP8_E4M3)
    logits = Sequences(runner, 1, 80, 16).forward({0: text})
    chosen = logits.argmax(-1)[len(TEXT) - 1 : -1].tolist()
    same = sum(ours == theirs for ours, theirs in zip(chosen, text[len(TEXT) :], strict=True))
    assert same >= 0.85 * len(chosen)
