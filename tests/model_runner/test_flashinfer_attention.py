"""Attention by FlashInfer, its kernels replaced by doubles that check what they are given."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, takewhile

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner import runner as runner_module
from kvrelay.model_runner.attention import backend as backend_module
from kvrelay.model_runner.attention import flashinfer_append, flashinfer_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferAttention,
    flashinfer_lacks,
)
from kvrelay.model_runner.attention.fp8_pages import FP8
from kvrelay.model_runner.attention.paged_plan import PagedPlan, plan_pages
from kvrelay.model_runner.attention.torch_attention import TorchAttention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers import flashinfer_elementwise
from kvrelay.model_runner.runner import ModelRunner
from tests.known import known
from tests.model_runner import flashinfer_double, flashinfer_elementwise_double
from tests.model_runner.sequences import Sequences, attention_of
from tests.model_runner.test_attention import KINDS, SINKS, make_batch, make_pool, make_rows
from tests.model_runner.test_decoder import EXPERTS, NAMES, assert_close
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GEOMETRY = KVGeometry(2, 2, 64, torch.bfloat16, 16)
HEADS = QueryHeads(4, 64, 0.125)
LATENT = KVGeometry(2, 1, 576, torch.bfloat16, 16, latent=True)
LATENT_HEADS = QueryHeads(16, 512, 0.1)

lengths_of_sequences = st.lists(
    st.integers(1, 40).flatmap(lambda all_: st.tuples(st.integers(0, all_), st.just(all_))),
    max_size=5,
)


class AnyDims:
    def __contains__(self, dims: object) -> bool:
        return True


@dataclass(frozen=True)
class Multiples:
    """Dimensions that make whole vectors of 16 bytes."""

    of: int

    def __contains__(self, dims: object) -> bool:
        each = dims if isinstance(dims, tuple) else (dims,)
        return all(dim % self.of == 0 for dim in each)


def use_double(patch: pytest.MonkeyPatch, latents_of: int = 8) -> None:
    """The double in place of the package, for tiny models in any dtype, with any dimensions.

    Latents whose dimensions are multiples of `latents_of` are written by its kernel: in FP8 of 16.
    """
    for place in (flashinfer_attention, runner_module):
        patch.setattr(place, "import_flashinfer", lambda *_: flashinfer_double.PACKAGE)
    patch.setattr(flashinfer_attention, "DTYPES", (torch.float32, torch.bfloat16))
    patch.setattr(flashinfer_attention, "HEAD_DIMS", range(1, 129))
    patch.setattr(flashinfer_attention, "EXPANDED_DIMS", AnyDims())
    for one in (flashinfer_attention, flashinfer_double):
        patch.setattr(one, "FP8_LATENTS", Multiples(8))
        patch.setattr(one, "FP8_LATENT_DTYPES", (torch.float32, torch.bfloat16))
    for module in (flashinfer_elementwise, flashinfer_elementwise_double):
        patch.setattr(module, "ROTATED_DIMS", Multiples(8))
    for each in (flashinfer_append, flashinfer_elementwise_double):
        patch.setattr(each, "APPENDED_DIMS", Multiples(16))  # also in FP8
        patch.setattr(each, "APPENDED_LATENTS", Multiples(latents_of))
    patch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1 << 20)
    patch.setattr(flashinfer_attention, "LATENT_MULTIPLE", 1)
    patch.setattr(flashinfer_attention, "ROTARY_MULTIPLE", 1)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def batch_of(lengths: Sequence[tuple[int, int]], geometry: KVGeometry) -> ForwardBatch:
    """As `make_batch`, but for no sequences, too."""
    if lengths:
        return make_batch(list(lengths), geometry, 5 * geometry.pages_for(40) + 3)
    empty = np.empty(0, np.int64)
    table = np.empty((0, 3), np.int32)
    return ForwardBatch(
        empty, empty, np.zeros(1, np.int32), empty.astype(np.int32), (table,), empty
    )


@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_of_sequences,
    page_size=st.integers(1, 17),
    window=st.none() | st.integers(1, 45),
)
@example(lengths=[(0, 1)], page_size=2, window=1)
def test_plan_has_the_visible_pages_and_nothing_else(
    lengths: list[tuple[int, int]], page_size: int, window: int | None
) -> None:
    geometry = replace(GEOMETRY, page_size=page_size, window=window)
    batch = batch_of(lengths, geometry)
    (table,) = batch.page_tables
    plan = plan_pages(batch, geometry)
    for array in vars_of(plan):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert plan.num_decodes == len(list(takewhile(lambda one: one[0] == 1, lengths)))
    for index, (new, all_) in enumerate(lengths):
        first_page = plan.first_pages[index]
        pages = table[index, first_page : first_page + np.diff(plan.kv_indptr)[index]]
        # Token by token: the pages that a new token, or the one that would come next, sees.
        first = all_ - new
        oldest = 0 if window is None else max(0, first + 1 - window)
        expected = list(dict.fromkeys(table[index, t // page_size] for t in range(oldest, all_)))
        assert pages.tolist() == expected
        assert -1 not in pages
        seen = all_ - oldest // page_size * page_size if expected else 0
        assert plan.kv_lens[index] == seen
        assert plan.last_page_len[index] == ((all_ - 1) % page_size + 1 if expected else 0)


def vars_of(plan: PagedPlan) -> list[np.ndarray]:
    return [getattr(plan, field.name) for field in fields(plan)]


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_sequences, cut=st.integers(0, 5))
def test_a_part_of_a_plan_is_the_plan_of_a_part(lengths: list[tuple[int, int]], cut: int) -> None:
    cut = min(cut, len(lengths))
    plan = plan_pages(batch_of(lengths, GEOMETRY), GEOMETRY)
    for first, end in ((0, cut), (cut, len(lengths))):
        own = plan_pages(batch_of(lengths[first:end], GEOMETRY), GEOMETRY)
        for ours, theirs in zip(vars_of(plan.part(first, end)), vars_of(own), strict=True):
            assert np.array_equal(ours, theirs)


@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths_of_sequences,
    page_size=st.integers(1, 17),
    window=st.none() | st.integers(1, 45),
    softcap=st.sampled_from([None, 0.7]),
    group=st.sampled_from([1, 2, 3, 4, 5, 7]),
    order=st.sampled_from(PageOrder),
)
def test_any_batch_agrees_with_torch(
    lengths: list[tuple[int, int]],
    page_size: int,
    window: int | None,
    softcap: float | None,
    group: int,
    order: PageOrder,
) -> None:
    geometry = KVGeometry(2, 2, 8, torch.float32, page_size, order, window=window)
    lengths = [(new, all_) for new, all_ in lengths if new]
    agrees_with_torch(geometry, QueryHeads(2 * group, 8, 0.3, softcap), lengths)


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 40), (1, 1), (1, 16)],
        [(1, 33), (1, 5), (7, 7), (30, 39)],
        [(7, 7), (1, 33), (30, 39)],
        [(4, 21)],
    ],
)
def test_every_kind_agrees_with_torch(
    kind: str, order: PageOrder, lengths: list[tuple[int, int]]
) -> None:
    geometry, heads = KINDS[kind]
    agrees_with_torch(replace(geometry, order=order), heads, lengths)


def test_sinks_agree_with_torch() -> None:
    """By what kernels tell of their sums: they know no sinks."""
    geometry, heads = KINDS["window"]
    agrees_with_torch(geometry, heads, [(1, 33), (1, 5), (7, 7), (30, 39)], SINKS)


def agrees_with_torch(
    geometry: KVGeometry,
    heads: QueryHeads,
    lengths: list[tuple[int, int]],
    sinks: torch.Tensor | None = None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch)
        batch = batch_of(lengths, geometry)
        total = 5 * geometry.pages_for(40) + 3
        torch.manual_seed(0)
        pool, rows = make_pool(geometry, batch, total), make_rows(batch, geometry, heads)
        reference = KVPool(geometry, total, CPU)
        reference.data.copy_(pool.data)
        (table,) = batch.page_tables
        step = FlashInferAttention(FlashInfer(CPU), pool, heads).plan(batch, table)
        got = step.attend(1, rows, sinks)
        assert got.shape == (len(rows), heads.num_heads * heads.value_dim)
        if lengths:
            plain = TorchAttention(reference, heads).plan(batch, table)
            expected = plain.attend(1, rows, sinks)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(pool.data.nan_to_num(7), reference.data.nan_to_num(7))


@few(8)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [*NAMES, *EXPERTS])
def test_every_model_agrees_with_transformers(name: str, models: Models, tokens: list[int]) -> None:
    """In float32, in prompts' chunks, as drafts are verified, and token by token."""
    runner = ModelRunner(
        models.folder(name), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    running = Sequences(runner, 1, 60)
    runner.warm_up()
    cuts = [0, 1, 8, 30, 31, 50, 54, 55, 56]
    parts = [running.forward({0: tokens[a:b]}) for a, b in pairwise(cuts)]
    assert_close(torch.cat(parts), models.logits(name, tokens[:56]))


@pytest.mark.usefixtures("double")
def test_one_plan_serves_all_layers_of_a_pool(models: Models, tokens: list[int]) -> None:
    """And one workspace all wrappers, all made before there are pools."""
    runner = ModelRunner(
        models.folder("gemma3"), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    flashinfer = attention_of(runner)._flashinfer
    assert flashinfer is not None
    sets = [one for both in flashinfer._wrappers.values() for one in both]
    wrappers = [one for each in sets for one in each]
    assert flashinfer.nbytes == flashinfer_attention.WORKSPACE_BYTES + len(wrappers) * (8 << 20)
    assert len(wrappers) == 8  # prefill and decode, with and without a window, for two steps
    running = Sequences(runner, 2, 60)
    running.forward({0: tokens[:9], 1: tokens[:5]})
    running.forward({0: tokens[9:10], 1: tokens[5:6]})
    plans = [one.plans for one in wrappers if isinstance(one, flashinfer_double.Grouped)]
    assert sorted(plans) == [0] * 4 + [1] * 4
    assert [one for both in flashinfer._wrappers.values() for one in both] == sets


@pytest.mark.usefixtures("double")
def test_tokens_beside_a_prompt_run_the_decode_kernels() -> None:
    """One launch more a layer, and the prefill kernels have the prompts' rows alone."""
    lengths = [(1, 40), (1, 33), (1, 5), (7, 7), (1, 9)]
    batch = make_batch(lengths, GEOMETRY, 20)
    backend = FlashInferAttention(FlashInfer(CPU), make_pool(GEOMETRY, batch, 20), HEADS)
    step = backend.plan(batch, batch.page_tables[0])
    step.attend(0, make_rows(batch, GEOMETRY, HEADS))
    prefill, decode = backend.wrappers
    assert isinstance(prefill, flashinfer_double.Prefill)
    assert isinstance(decode, flashinfer_double.Decode)
    assert (prefill.runs, decode.runs) == (1, 1)
    assert prefill._query_indptr.tolist() == [0, 7, 8]
    assert len(decode._query_indptr) == 4


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("geometry", "heads"), [(GEOMETRY, HEADS), (LATENT, LATENT_HEADS)], ids=["grouped", "latent"]
)
def test_a_step_is_planned_apart_from_the_one_that_runs(
    geometry: KVGeometry, heads: QueryHeads
) -> None:
    """The plan of the one before may still be on its way from pinned memory to the device."""
    batch = make_batch([(1, 5)], geometry, 4)
    backend = FlashInferAttention(FlashInfer(CPU), make_pool(geometry, batch, 4), heads)
    planned = []
    for _ in range(4):
        backend.plan(batch, batch.page_tables[0])
        planned.append(set(map(id, backend.wrappers)))
    for before, after in pairwise(planned):
        assert not before & after
    assert planned[::2] == planned[:1] * 2


@pytest.mark.usefixtures("double")
def test_only_the_latest_plan_can_be_used() -> None:
    batch = make_batch([(1, 5)], GEOMETRY, 4)
    pool = make_pool(GEOMETRY, batch, 4)
    backend = FlashInferAttention(FlashInfer(CPU), pool, HEADS)
    rows = make_rows(batch, GEOMETRY, HEADS)
    first = backend.plan(batch, batch.page_tables[0])
    backend.plan(batch, batch.page_tables[0]).attend(0, rows)
    with pytest.raises(AssertionError, match="later plan"):
        first.attend(0, rows)


@pytest.mark.parametrize(
    ("geometry", "heads", "lack"),
    [
        (GEOMETRY, HEADS, None),
        (replace(GEOMETRY, window=7), replace(HEADS, softcap=30.0), None),
        (LATENT, LATENT_HEADS, None),
        (replace(GEOMETRY, dtype=torch.float32), HEADS, "dtype float32"),
        (replace(GEOMETRY, head_dim=80), QueryHeads(4, 80, 0.1), None),
        (replace(GEOMETRY, head_dim=320), QueryHeads(4, 320, 0.1), "heads of 320 dimensions"),
        (replace(LATENT, head_dim=544), LATENT_HEADS, "latents of 512 and 32 dimensions"),
        (LATENT, replace(LATENT_HEADS, value_dim=448), "latents of 448 and 128 dimensions"),
        (replace(LATENT, window=9), LATENT_HEADS, "windows or soft caps over latents"),
        (LATENT, replace(LATENT_HEADS, num_heads=40), None),
        (LATENT, replace(LATENT_HEADS, num_heads=160), "160 query heads over latents"),
    ],
)
def test_what_flashinfer_lacks(geometry: KVGeometry, heads: QueryHeads, lack: str | None) -> None:
    assert flashinfer_lacks(geometry, geometry.dtype, heads, CPU) == lack


@pytest.mark.parametrize(
    ("geometry", "heads", "dtype", "capability", "lack"),
    [
        (LATENT, LATENT_HEADS, torch.bfloat16, (9, 0), None),
        (LATENT, LATENT_HEADS, torch.bfloat16, (8, 0), "latents in FP8 on GPUs that are not sm_90"),
        (LATENT, LATENT_HEADS, torch.bfloat16, (10, 0), "latents in FP8 on GPUs that are not sm"),
        (LATENT, LATENT_HEADS, torch.float16, (9, 0), "latents in FP8 with queries in float16"),
        (
            replace(LATENT, head_dim=320),
            replace(LATENT_HEADS, value_dim=256),
            torch.bfloat16,
            (9, 0),
            "latents in FP8 of 256 and 64 dimensions",
        ),
        (GEOMETRY, HEADS, torch.float16, (8, 0), None),
    ],
)
def test_what_flashinfer_lacks_of_fp8(
    geometry: KVGeometry,
    heads: QueryHeads,
    dtype: torch.dtype,
    capability: tuple[int, int],
    lack: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    got = flashinfer_lacks(replace(geometry, dtype=FP8), dtype, heads, CUDA)
    assert got == lack if lack is None else got is not None and got.startswith(lack)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_decode_has_a_kernel_for_every_group(double: None, group: int) -> None:
    """Without tensor cores there is none for 5 and 7, and FlashInfer only says so in `plan`."""
    geometry = replace(GEOMETRY, dtype=torch.float32, head_dim=16)
    agrees_with_torch(geometry, QueryHeads(2 * group, 16, 0.25), [(1, 20), (1, 3)])


@pytest.mark.parametrize("num_heads", [12, 16, 20, 40, 96, 128])
def test_latents_of_any_number_of_heads_agree_with_torch(num_heads: int) -> None:
    """Where tiles of queries would end within a token, FlashInfer refuses a causal plan."""
    geometry = KVGeometry(2, 1, 24, torch.float32, 4, latent=True)
    heads = QueryHeads(num_heads, 16, 0.3)
    agrees_with_torch(geometry, heads, [(1, 33), (1, 17), (1, 1)])
    # With one of these the last key that some query sees is the first of a tile of keys.
    for earlier in range(16):
        agrees_with_torch(geometry, heads, [(14, earlier + 14), (1, 17)])


@pytest.mark.parametrize(
    ("choice", "dtype", "message"),
    [
        ("flashinfer", torch.bfloat16, "--attention flashinfer needs a CUDA device, not cpu"),
        ("flashinfer", torch.float32, "--attention flashinfer has no kernels for dtype float32"),
        ("cpu", torch.float64, "--attention cpu has no kernels for torch.float64 on cpu"),
    ],
)
def test_a_choice_that_cannot_compute_is_refused(
    choice: str, dtype: torch.dtype, message: str
) -> None:
    geometry = replace(GEOMETRY, dtype=dtype)
    with pytest.raises(UnsupportedOptionError, match=message):
        AttentionFactory(AttentionChoice(choice), [geometry], dtype, HEADS, CPU)


@pytest.mark.parametrize("choice", ["torch", "flashinfer"])
@pytest.mark.usefixtures("double")
def test_only_our_own_kernels_are_batch_invariant(choice: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"not for --attention {choice}"):
        AttentionFactory(
            AttentionChoice(choice), [GEOMETRY], torch.bfloat16, HEADS, CPU, batch_invariant=True
        )


def test_choices_on_a_cpu() -> None:
    pool = KVPool(GEOMETRY, 4, CPU)
    for choice, kind in [("torch", TorchAttention), ("cpu", CpuAttention), ("auto", CpuAttention)]:
        made = AttentionFactory(
            AttentionChoice(choice), [GEOMETRY], torch.bfloat16, HEADS, CPU
        ).make(pool)
        assert type(made) is kind


@pytest.mark.parametrize(
    ("geometry", "fault", "capability", "lack", "chosen", "said"),
    [
        (GEOMETRY, None, (8, 0), None, "flashinfer", ""),
        (GEOMETRY, ModuleNotFoundError, (9, 0), None, "torch", "the package is not usable here"),
        (GEOMETRY, RuntimeError, (9, 0), None, "torch", "the package is not usable here"),
        (replace(GEOMETRY, dtype=torch.float32), None, (9, 0), None, "torch", "dtype float32"),
        (GEOMETRY, None, (7, 5), None, "torch", "sm_80"),
        (GEOMETRY, None, (9, 0), "no nvcc", "torch", "cannot compile its kernels: no nvcc"),
    ],
)
def test_auto_on_a_gpu(
    geometry: KVGeometry,
    fault: type[Exception] | None,
    capability: tuple[int, int],
    lack: str | None,
    chosen: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says why it does without FlashInfer."""

    def find(name: str) -> object:
        assert name == "flashinfer"
        if fault is not None:
            raise fault("flashinfer is not what it should be")
        return flashinfer_double.PACKAGE

    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(flashinfer_attention, "compiler_lacks", lambda: lack)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.WARNING, backend_module.__name__):
        assert backend_module._choose([geometry], geometry.dtype, HEADS, CUDA) == chosen
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_a_model_is_refused_before_its_weights_are_read(models: Models) -> None:
    read: list[int] = []
    with pytest.raises(UnsupportedOptionError, match="--attention flashinfer"):
        ModelRunner(
            models.folder("llama"),
            "bfloat16",
            "cpu",
            attention=AttentionChoice.FLASHINFER,
            on_read=read.append,
        )
    assert read == []


@pytest.mark.parametrize(
    ("double_of", "name"),
    [
        (flashinfer_double.Prefill, "BatchPrefillWithPagedKVCacheWrapper"),
        (flashinfer_double.Decode, "BatchDecodeWithPagedKVCacheWrapper"),
        (flashinfer_double.Ragged, "BatchPrefillWithRaggedKVCacheWrapper"),
        (flashinfer_double.Latent, "mla.BatchMLAPagedAttentionWrapper"),
        (flashinfer_double.Metadata, "mla.MLAPlanMetadata"),
    ],
)
def test_the_doubles_have_the_parameters_of_the_package(double_of: type, name: str) -> None:
    """Of the one that is installed, which needs no GPU for that."""
    real: object = pytest.importorskip("flashinfer", exc_type=ImportError)
    for part in name.split("."):
        real = getattr(real, part)
    for method in {"__init__", "plan", "run", "csr"} & set(vars(double_of)):
        if double_of is flashinfer_double.Metadata and method == "__init__":
            continue  # made by `csr`
        ours = set(inspect.signature(getattr(double_of, method)).parameters)
        theirs = set(inspect.signature(getattr(real, method)).parameters)
        if method == "plan" and "kwargs" in theirs:  # decode's: the rest is in a method behind
            theirs |= set(inspect.signature(known(getattr(real, "_plan_impl", None))).parameters)
        assert ours <= theirs


def test_plans_of_graphs_are_made_as_the_package_does() -> None:
    """By a function of its own, and by what a wrapper of latents shows of its latest plan."""
    package = pytest.importorskip("flashinfer", exc_type=ImportError)
    ours = set(inspect.signature(flashinfer_double.fast_decode_plan).parameters)
    assert ours <= set(inspect.signature(package.fast_decode_plan).parameters)
    mirrored = importlib.import_module("flashinfer.mla._batch_mla._wrapper")._MIRRORED_BACKEND_ATTRS
    assert set(mirrored) == {
        "_cached_module",
        "_int_workspace_buffer",
        "_pin_memory_int_workspace_buffer",
    }
