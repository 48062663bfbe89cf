"""Steps that verify drafts as graphs; see `test_cuda_graphs` for those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention import flashinfer_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import ForwardBatch, PendingIds
from kvrelay.model_runner.config.cuda_graphs import (
    MOST_DRAFTED_ROWS,
    GraphOptions,
    GraphRoom,
    GraphShape,
    GraphSizes,
)
from kvrelay.model_runner.draft_model import DraftModel
from kvrelay.model_runner.graphs.decode_graphs import DecodeGraphs
from kvrelay.model_runner.graphs.padding import PaddedBatch, pad_batch, tokens_each
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner import test_draft_model
from tests.model_runner.sequences import Sequences, attention_of
from tests.model_runner.test_cuda_graphs import (
    GRAPHS,
    SIZES,
    Captures,
    check_logits,
    check_pages,
    clear_dummy_pages,
    make_running,
)
from tests.model_runner.test_decoder import OFTEN, assert_close
from tests.model_runner.test_draft_model import GREEDY, SAMPLED, Speculation, assert_same
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

EACH = 4
DRAFTED = replace(GRAPHS, most_each=EACH)
WRONG = 7
"""A token that is drafted and is not what the text has."""


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


def run(running: Sequences, tokens: list[int]) -> list[tuple[int, int, torch.Tensor]]:
    """Prompts, then tokens and drafts of which some are right, among steps of decode.

    Returns: a sequence, its tokens, and the logits after them, also after right drafts.
    """
    results, places = [], dict.fromkeys(range(5), 0)

    def step(new: dict[int, tuple[int, int]]) -> None:
        """So many of each sequence's next tokens, and wrong ones behind them."""
        ids: dict[int, Sequence[int]] = {
            i: tokens[i + places[i] : i + places[i] + right] + [WRONG] * wrong
            for i, (right, wrong) in new.items()
        }
        logits = iter(running.forward(ids))
        for i, (right, wrong) in new.items():
            for place in range(right + wrong):
                row = next(logits).clone()
                if place < right:
                    results.append((i, places[i] + place + 1, row))
            places[i] += right
            running.seq_lens[i] -= wrong

    step({0: (20, 0), 1: (7, 0), 2: (4, 0)})
    for _ in range(5):  # over the end of pages and windows
        step({0: (2, 2), 1: (1, 0), 2: (4, 0)})  # a sequence is missing
        step({1: (1, 1)})
        step({0: (1, 0), 2: (1, 0)})  # no drafts
    step({3: (30, 0), 0: (1, 3)})  # a prompt
    step({3: (1, 3), 0: (3, 0), 1: (1, 0), 2: (2, 0)})
    return results


@few(5)
@pytest.mark.parametrize("name", OFTEN)
def test_every_model_verifies_drafts_by_graphs(
    name: str, models: Models, tokens: list[int]
) -> None:
    running, captures = make_running(models, name, graphs=DRAFTED)
    before = clear_dummy_pages(running)
    check_logits(run(running, tokens), models, name, tokens)
    if "window" not in name and "gemma" not in name:  # there pages become NaN when they are unseen
        check_pages(running, before)
    # The largest first: sizes of 4, 2, 1 with drafts are 16, 8, 4 rows.
    assert [graph.replays for graph in captures.graphs] == [6, 0, 0, 5, 5, 0]


def test_latents_are_planned_with_heads_that_divide_a_tile(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a plan is made anew."""
    monkeypatch.setattr(flashinfer_attention, "fitting_heads", lambda count: 2 * count)
    running, captures = make_running(models, "deepseek-v3", graphs=DRAFTED)
    check_logits(run(running, tokens), models, "deepseek-v3", tokens)
    assert captures.graphs[0].replays


def test_sequences_that_are_not_divided(models: Models, tokens: list[int]) -> None:
    running, captures = make_running(models, "qwen3", splits=AttentionSplits.NONE, graphs=DRAFTED)
    check_logits(run(running, tokens), models, "qwen3", tokens)
    assert captures.graphs[0].replays


def tokens_first(self: PaddedBatch, values: np.ndarray, dummy: int = 0) -> np.ndarray:
    """Puts a sequence's own tokens into the first of its rows."""
    starts = self.batch.query_start
    spread = np.full(self.shape.rows, dummy, np.int64)
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        first = i * self.shape.each
        spread[first : first + end - start] = values[start:end]
    return spread


def no_dummy_page(self: PaddedBatch, table: np.ndarray, page_size: int, _: int) -> object:
    return NEW_TOKEN_SLOTS(self, table, page_size, int(table[0, 0]))


def own_queries_alone(self: PaddedBatch, geometry: KVGeometry) -> PagedPlan:
    """Plans what a sequence brings, though a graph has more rows."""
    plan = PLAN(self, geometry)
    return replace(plan, query_indptr=self.batch.query_start)


NEW_TOKEN_SLOTS, PLAN = PaddedBatch.new_token_slots, PaddedBatch.plan


@pytest.mark.parametrize(
    ("name", "fault", "model"),
    [
        ("spread", tokens_first, "llama"),
        ("new_token_slots", no_dummy_page, "llama"),
        ("plan", own_queries_alone, "deepseek-v3"),
    ],
)
def test_planted_faults_are_found(
    name: str,
    fault: object,
    model: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, _ = make_running(models, model, graphs=DRAFTED)
    monkeypatch.setattr(PaddedBatch, name, fault)
    with pytest.raises((AssertionError, IndexError)):
        check_logits(run(running, tokens), models, model, tokens)


def replays(captures: Captures) -> int:
    return sum(graph.replays for graph in captures.graphs)


def test_steps_that_no_graph_has_are_launched_kernel_by_kernel(
    models: Models, tokens: list[int]
) -> None:
    """Sequences shorter than a graph's rows, more tokens, sequences, or logits than it has."""
    running, captures = make_running(models, "llama", graphs=DRAFTED)
    reference = models.logits("llama", tokens[:40])
    assert_close(running.forward({0: tokens[:3]}), reference[:3])
    running.forward({1: tokens[:9]})
    assert_close(running.forward({1: tokens[9:14]}), reference[9:14])
    running.forward(dict.fromkeys((2, 3, 4), tokens[:9]))
    others = dict.fromkeys((2, 3, 4), tokens[9:10])
    more_than_any = running.forward({0: tokens[3:5], 1: tokens[14:15], **others})
    assert_close(more_than_any[:2], reference[3:5])
    chosen = running.forward({0: tokens[5:7]}, [1] * (EACH + 1))
    assert_close(chosen, reference[6:7].expand(EACH + 1, -1))
    assert replays(captures) == 0
    assert_close(running.forward({0: tokens[7:9]}), reference[7:9])
    assert replays(captures) == 1


def test_tokens_that_the_host_does_not_know_are_put_between_drafts(
    models: Models, tokens: list[int]
) -> None:
    """And only the asked rows of logits come."""
    running, captures = make_running(models, "llama", graphs=DRAFTED)
    running.forward({0: tokens[:9], 1: tokens[:5]})
    known = running.batch({1: tokens[5:8], 0: tokens[9:10]}, [0, 3, 2])
    unknown = known.input_ids.copy()
    unknown[3] = -1
    pending = PendingIds(np.array([3]), np.array([1]), torch.tensor([5, tokens[9]]))
    got = running._runner.launch(replace(known, input_ids=unknown, pending=pending))
    reference = models.logits("llama", tokens[:10])
    assert_close(got, reference[[5, 9, 7]])
    assert replays(captures) == 1


def test_graphs_follow_the_sizes_and_the_drafts() -> None:
    room = GraphRoom(GraphSizes((1, 4, 128)), 99, most_each=5)
    assert room.shapes == ((1, 1), (4, 1), (128, 1), (1, 5), (4, 5))
    assert room.most_rows == 128
    assert replace(room, most_each=4).most_rows == 512 == MOST_DRAFTED_ROWS
    found = {one: room.shape_of(*one) for one in [(1, 1), (3, 1), (3, 2), (4, 5), (1, 6), (5, 2)]}
    assert found == {
        (1, 1): (1, 1),
        (3, 1): (4, 1),
        (3, 2): (4, 5),
        (4, 5): (4, 5),
        (1, 6): None,
        (5, 2): None,
    }
    assert replace(room, most_each=1).shapes == ((1, 1), (4, 1), (128, 1))


@pytest.mark.parametrize(("name", "most"), [("llama", 4), ("qwen3-window", 8)])
def test_a_graph_has_no_more_rows_a_sequence_than_a_window(
    name: str, most: int, models: Models
) -> None:
    """Its first query would see no token that is still there."""
    options = replace(GRAPHS, most_each=4 if name == "llama" else 20)
    runner = ModelRunner(
        models.folder(name), "float32", "cpu", attention=AttentionChoice.FLASHINFER, graphs=options
    )
    room = runner._graph_room(options)
    assert room is not None
    assert room.most_each == most


def test_memory_is_taken_before_pools_are(models: Models) -> None:
    """A wrapper for each graph and pool, the arrays and the logits of the largest step."""
    taken = []
    for options in (GRAPHS, DRAFTED):
        runner = ModelRunner(
            models.folder("gemma3"),
            "float32",
            "cpu",
            attention=AttentionChoice.FLASHINFER,
            graphs=options,
            capture=Captures(),
        )
        flashinfer = attention_of(runner)._flashinfer
        assert flashinfer is not None
        assert runner._graph_logits is not None
        before = flashinfer.nbytes
        scratch = runner.capture_on_scratch()
        assert isinstance(scratch, DecodeGraphs)
        assert len(scratch._graphs) == len(SIZES.sizes) * (1 if options is GRAPHS else 2)
        assert flashinfer.nbytes == before
        taken.append((before, len(runner._graph_logits)))
    (plain, few_rows), (drafted, rows) = taken
    assert drafted - plain > 2 * len(SIZES.sizes) * (8 << 20)
    assert (few_rows, rows) == (4, 4 * EACH)


def test_padded_drafts() -> None:
    """A sequence's own tokens come last; a missing one has all of its own on the dummy page."""
    table = np.array([[3, 4, 8, 1], [5, 6, -1, -1]], np.int32)
    batch = ForwardBatch(
        input_ids=np.array([5, 6, 7]),
        positions=np.array([9, 3, 4]),
        query_start=np.array([0, 1, 3], np.int32),
        seq_lens=np.array([10, 5], np.int32),
        page_tables=(table,),
        logit_rows=np.array([1, 2]),
    )
    assert tokens_each(batch) == 2
    padded = pad_batch(batch, GraphShape(3, 4), [11], page_size=3)
    assert padded.rows.tolist() == [3, 6, 7, 8, 9, 10, 11]
    spread = padded.spread(padded.batch.input_ids, -7)
    assert spread.tolist() == [-7, -7, -7, 5, -7, -7, 6, 7, 0, 0, 0, 0]
    assert padded.batch.positions.tolist() == [9, 3, 4, 0, 1, 2, 3]
    [padded_table] = padded.batch.page_tables
    assert padded_table.tolist() == [*table.tolist(), [11, 11, -1, -1]]
    pages, slots = padded.new_token_slots(padded_table, 3, 11)
    assert pages.tolist() == [11, 11, 11, 1, 11, 11, 6, 6, 11, 11, 11, 11]
    assert slots.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 2, 0]


def speculate(
    models: Models, name: str, tokens: list[int], graphs: GraphOptions | None, draft: str | None
) -> tuple[Speculation, list[Captures]]:
    """Sequences that a draft model of a runner with or without graphs guesses for."""
    captures = [Captures(), Captures()]
    options: dict[str, Any] = {"attention": AttentionChoice.FLASHINFER}
    target = ModelRunner(
        models.folder(name), "float32", "cpu", graphs=graphs, capture=captures[0], **options
    )
    drafter = None
    if draft is not None:
        drafter = DraftModel(
            models.folder(draft),
            "float32",
            "cpu",
            graphs=None if graphs is None else replace(graphs, most_each=2),
            capture=captures[1],
            **options,
        )
    prompts = [tokens[:17], tokens[20:21], tokens[30:42]]
    running = Speculation(target, drafter, prompts, (GREEDY, SAMPLED, SAMPLED))
    target.capture_graphs()
    if drafter is not None:
        drafter.capture_graphs()
    running.prefill(chunk=9)
    return running, captures


@pytest.mark.parametrize(("name", "draft"), [("llama", "llama"), ("deepseek-v3", "gemma3")])
def test_tokens_are_those_without_graphs_and_without_drafts(
    name: str, draft: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified by graphs, and guessed by graphs from the first guess on."""
    monkeypatch.setattr(test_draft_model, "LENGTH", 9)
    plain, _ = speculate(models, name, tokens, None, None)
    running, captures = speculate(models, name, tokens, DRAFTED, draft)
    assert_same(running.finish(EACH - 1), plain.finish(0))
    assert running.kept
    assert (running.kept == running.guessed) == (name == draft)
    of_target, of_draft = captures
    drafted = [graph.replays for graph in of_target.graphs]
    assert sum(drafted[:2]) + drafted[3] > 3
    # The draft model's forwards with two tokens of a sequence, and its single guesses.
    assert replays(of_draft) > replays(of_target)
