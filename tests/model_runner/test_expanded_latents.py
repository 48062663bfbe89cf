"""Prompts over latents by keys and values that are made of them: as by absorption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention import expanded_latents, flashinfer_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.expanded_latents import (
    ExpandedStep,
    SplitLatents,
    SplittingAttention,
    choose_expanded,
    take_sequences,
    token_places,
)
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention, expands
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.model_config import MLAConfig
from kvrelay.model_runner.config.query_heads import ExpandedHeads
from kvrelay.model_runner.runner import ModelRunner
from tests.known import known
from tests.model_runner.sequences import Sequences, attention_of
from tests.model_runner.test_attention import make_batch
from tests.model_runner.test_decoder import LATENT, assert_close
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import Models

GEOMETRY = KVGeometry(1, 1, 32, torch.float32, 4, latent=True)
DEEPSEEK = MLAConfig(128, 1536, 512, 128, 64, 128, 0.1, attention_bias=False, rope_interleave=True)
lengths = st.lists(
    st.integers(1, 30).flatmap(lambda all_: st.tuples(st.integers(1, all_), st.just(all_))),
    min_size=1,
    max_size=5,
)


def make_running(models: Models, name: str, least: int | None) -> tuple[Sequences, list[str]]:
    """Three sequences, and the kinds of their steps; `least` new tokens are expanded."""
    runner = ModelRunner(
        models.folder(name), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    running = Sequences(runner, 3, 60)
    (backend,) = runner._backends
    assert isinstance(backend, SplittingAttention)
    if least is not None:
        backend._heads = replace(backend._heads, least_new_tokens=least)
    kinds = []
    plan = backend.plan

    def noted(*args: object) -> object:
        step = plan(*args)  # type: ignore[arg-type]
        if isinstance(step, SplitLatents):
            kinds.append("expanded" if step.absorbed is None else "both")
        else:
            kinds.append("absorbed")
        return step

    backend.plan = noted  # type: ignore[method-assign,assignment]
    return running, kinds


@pytest.mark.parametrize("name", [*LATENT, "deepseek-wide"])
def test_every_kind_of_step(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, chunks with history, beside short ones and single tokens, in any place."""
    use_double(monkeypatch)
    running, kinds = make_running(models, name, least=6)
    texts = [tokens[:50], tokens[7:57], tokens[20:70]]
    places = [0, 0, 0]
    references = [models.logits(name, text) for text in texts]
    for new in ({0: 12}, {1: 3, 0: 8, 2: 9}, {0: 1, 1: 20, 2: 1}, {2: 1, 0: 2}, {2: 7, 1: 6}):
        ids: dict[int, Sequence[int]] = {
            i: texts[i][places[i] : places[i] + count] for i, count in new.items()
        }
        got = running.forward(ids)
        expected = [references[i][places[i] : places[i] + count] for i, count in new.items()]
        assert_close(got, torch.cat(expected))
        for i, count in new.items():
            places[i] += count
    assert kinds == ["expanded", "both", "both", "absorbed", "expanded"]


def test_decode_stays_absorbed(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_double(monkeypatch)
    running, kinds = make_running(models, "deepseek-v3", least=None)
    running.forward({0: tokens[:40]})
    running.forward({0: tokens[40:41], 1: tokens[:1]})
    running.forward({0: tokens[41:46]})  # drafts that are verified
    assert kinds == ["expanded", "absorbed", "absorbed"]


def test_what_does_not_fit_is_absorbed(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_double(monkeypatch)
    running, kinds = make_running(models, "deepseek-v3", least=1)
    token_bytes = 4 * 2 * (20 + 10) * 4
    monkeypatch.setattr(expanded_latents, "MOST_BYTES", 30 * token_bytes)
    running.forward({0: tokens[:30]})
    running.forward({1: tokens[:31]})
    got = running.forward({0: tokens[30:35], 2: tokens[:20]})
    assert kinds == ["expanded", "absorbed", "both"]
    text = models.logits("deepseek-v3", tokens[:35])
    assert_close(got, torch.cat((text[30:35], text[:20])))


def test_the_largest_steps_make_as_much_as_fits(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer context is absorbed: the memory of what is made is not seen there."""
    use_double(monkeypatch)
    running, _ = make_running(models, "deepseek-v3", least=None)
    monkeypatch.setattr(expanded_latents, "MOST_BYTES", 30 * 4 * 2 * (20 + 10) * 4 + 1)
    choose, made = expanded_latents.choose_expanded, []

    def note(batch: ForwardBatch, *args: Any) -> Any:
        chosen = choose(batch, *args)
        made.append(int(batch.seq_lens[chosen].sum()))
        return chosen

    monkeypatch.setattr(expanded_latents, "choose_expanded", note)
    runner = running._runner
    heads = known(attention_of(runner)._expanded_heads)
    attention_of(runner)._expanded_heads = replace(heads, least_new_tokens=1)
    assert runner.largest_contexts(30) == (30, 30)
    for context in runner.largest_contexts(60):
        assert len(runner.run_largest(20, 0, context)) == 20
    assert made == [0, 30, 0]


@pytest.mark.parametrize("fault", ["token_places", "take_sequences"])
def test_planted_faults_are_found(
    fault: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens read from other slots, and rows that are another sequence's."""
    use_double(monkeypatch)
    running, _ = make_running(models, "deepseek-v3", least=6)
    right = getattr(expanded_latents, fault)

    def wrong(*args: object) -> tuple[object, ...]:
        *first, last = right(*args)
        return (*first, last[::-1].copy())

    monkeypatch.setattr(expanded_latents, fault, wrong)
    got = running.forward({0: tokens[:9], 1: tokens[:2]})
    text = models.logits("deepseek-v3", tokens[:9])
    with pytest.raises(AssertionError):
        assert_close(got, torch.cat((text, text[:2])))


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, least=st.integers(1, 12), most=st.integers(0, 80))
def test_choice_and_parts(lengths: list[tuple[int, int]], least: int, most: int) -> None:
    """The parts have each token once, with its own pages."""
    batch = make_batch(lengths, GEOMETRY, 5 * 8 + 3)
    (table,) = batch.page_tables
    heads = ExpandedHeads(20, 10, least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded_latents, "MOST_BYTES", most * 7)
        chosen = choose_expanded(batch, heads, 7)
    new = np.array([n for n, _ in lengths])
    assert (new[chosen] >= least).all()
    assert batch.seq_lens[chosen].sum() <= most
    assert (np.diff(chosen) > 0).all()
    others = np.setdiff1d(np.arange(len(lengths)), chosen)
    seen = []
    for indices in (chosen, others):
        if not len(indices):
            continue
        part, part_table, rows = take_sequences(batch, table, indices)
        seen += rows.tolist()
        assert part.positions.tolist() == batch.positions[rows].tolist()
        assert np.diff(part.query_start).tolist() == new[indices].tolist()
        pages, slots = token_places(part, part_table, GEOMETRY)
        expected = [
            (table[i, t // 4], t % 4) for i in indices.tolist() for t in range(lengths[i][1])
        ]
        assert list(zip(pages.tolist(), slots.tolist(), strict=True)) == expected
    assert sorted(seen) == list(range(len(batch.positions)))


def test_deepseek_s_bound() -> None:
    """By counting products: 171 tokens."""
    assert DEEPSEEK.expanded_heads == ExpandedHeads(192, 128, 171)
    assert expands(ExpandedHeads(192, 128, 171))
    assert not expands(ExpandedHeads(20, 10, 1))
    assert replace(DEEPSEEK, kv_lora_rank=128).expanded_heads is None


@pytest.mark.parametrize("least", [6, 40])
def test_warm_up_runs_every_kind_of_kernel(
    least: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of keys and values, too: else the first long prompt waits until they are compiled."""
    use_double(monkeypatch)
    monkeypatch.setattr(
        MLAConfig, "expanded_heads", property(lambda _: ExpandedHeads(20, 10, least))
    )
    running, _ = make_running(models, "deepseek-v3", least=None)
    ran = []
    attend = ExpandedStep.attend

    def noted(step: ExpandedStep, *args: torch.Tensor) -> torch.Tensor:
        ran.append(len(args[0]))
        return attend(step, *args)

    monkeypatch.setattr(ExpandedStep, "attend", noted)
    running._runner.warm_up()
    assert set(ran) == {max(least, 32)}


def test_dimensions_without_kernels_stay_absorbed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_double(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "EXPANDED_DIMS", ((192, 128),))
    runner = ModelRunner(
        models.folder("deepseek-v3"), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    Sequences(runner, 1, 10)
    assert isinstance(runner._backends[0], FlashInferAttention)


def test_the_plans_of_two_steps_are_apart(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the one before may be on its way to the device."""
    use_double(monkeypatch)
    running, _ = make_running(models, LATENT[0], least=6)
    (backend,) = running._runner._backends
    batch, used = running.batch({0: tokens[:20]}), []
    for _ in range(3):
        step = backend.plan(batch, batch.page_tables[0])
        assert isinstance(step, SplitLatents)
        used.append(step.expanded._wrapper)
    assert used[0] is used[2] is not used[1]
