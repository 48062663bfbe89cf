"""Steps of decode as graphs: captured and launched again by a double that runs no Python twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner import runner as runner_module
from kvrelay.model_runner.attention import flashinfer_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.attention.flashinfer_buffers import GraphPages, StepBlock
from kvrelay.model_runner.attention.fp8_pages import FP8
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.batch import ForwardBatch, PendingIds
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphShape, GraphSizes
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.draft_model import DraftModel, DraftRequest, count_dummy_pages
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.graphs import padding
from kvrelay.model_runner.graphs.decode_graphs import DecodeGraphs
from kvrelay.model_runner.graphs.graph_step import GraphStep
from kvrelay.model_runner.graphs.padding import (
    PaddedBatch,
    empty_batch,
    pad_batch,
    tokens_each,
)
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling.sampler import SamplingRow
from kvrelay.wire.submit import SamplingParams
from tests.model_runner import graph_double
from tests.model_runner.graph_double import Recording
from tests.model_runner.sequences import Sequences, attention_of
from tests.model_runner.test_decoder import EXPERTS, OFTEN, assert_close
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import VOCAB_SIZE, Models
from tests.pairwise import few

SIZES = GraphSizes((1, 2, 4))
GRAPHS = GraphOptions(SIZES, page_size=3)


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)


class Captures:
    """Captures graphs, and keeps them in their order."""

    def __init__(self) -> None:
        self.graphs: list[Recording] = []

    def __call__(self) -> Callable[[Callable[[], object]], Recording]:
        return self._capture

    def _capture(self, work: Callable[[], object]) -> Recording:
        self.graphs.append(graph_double.capture(work))
        return self.graphs[-1]


def make_running(
    models: Models,
    name: str,
    order: PageOrder = PageOrder.PAGE_FIRST,
    kv_dtype: KVDtype = KVDtype.AUTO,
    splits: AttentionSplits = AttentionSplits.BATCH,
    graphs: GraphOptions = GRAPHS,
    moe_backend: MoEBackend = MoEBackend.TORCH,
) -> tuple[Sequences, Captures]:
    """Five sequences, and the graphs of 4, 2 and 1."""
    captures = Captures()
    runner = ModelRunner(
        models.folder(name),
        "float32",
        "cpu",
        attention=AttentionChoice.FLASHINFER,
        kv_dtype=kv_dtype,
        graphs=graphs,
        capture=captures,
        attention_splits=splits,
        moe_backend=moe_backend,
    )
    running = Sequences(runner, 5, 60, order=order)
    runner.warm_up()
    runner.capture_graphs()
    return running, captures


def run(running: Sequences, tokens: list[int]) -> list[tuple[int, int, torch.Tensor]]:
    """Prompts, then single tokens: by graphs, padded or not, among other steps.

    Returns: a sequence, its tokens, and the logits after them.
    """
    results = []
    places = dict.fromkeys(range(5), 0)

    def step(new: dict[int, int]) -> None:
        ids: dict[int, Sequence[int]] = {
            i: tokens[i + places[i] : i + places[i] + count] for i, count in new.items()
        }
        for i, count in new.items():
            places[i] += count
        last = np.cumsum(list(new.values())) - 1
        for i, logits in zip(new, running.forward(ids, last.tolist()), strict=True):
            results.append((i, places[i], logits.clone()))

    step({0: 20, 1: 7, 2: 1})
    for _ in range(3):
        step({0: 1, 1: 1, 2: 1})  # a row is missing
    step({3: 30, 4: 2, 0: 1})
    step({4: 1})
    step({4: 1, 2: 1})
    for _ in range(9):  # over the end of pages and windows
        step({3: 1, 0: 1, 4: 1, 1: 1})
        step({2: 1, 3: 1, 1: 1})
    step(dict.fromkeys(range(5), 1))  # more than any graph has
    step({1: 1})
    return results


def check_logits(
    results: list[tuple[int, int, torch.Tensor]], models: Models, name: str, tokens: list[int]
) -> None:
    references = {i: models.logits(name, tokens[i : i + 60]) for i in range(5)}
    got = torch.stack([logits for _, _, logits in results])
    assert_close(got, torch.stack([references[i][count - 1] for i, count, _ in results]))


def clear_dummy_pages(running: Sequences) -> list[torch.Tensor]:
    """What capturing has left there is gone; the pools as they are then."""
    for pool in running.pools:
        for layer in range(pool.geometry.num_layers):
            pool.layer(layer)[-1] = torch.nan
    return [pool.data.clone() for pool in running.pools]


def check_pages(running: Sequences, before: list[torch.Tensor]) -> None:
    """Pages that no sequence has are as they were, but for the dummy page."""
    for pool, table, old in zip(running.pools, running.page_tables, before, strict=True):
        own = set(table[table >= 0].tolist())
        dummy = pool.total_pages - 1
        assert dummy not in own
        changed = changed_pages(pool, old)
        assert dummy in changed
        assert changed - {dummy} <= own


def changed_pages(pool: KVPool, old: torch.Tensor) -> set[int]:
    differs = (pool.data.view(torch.uint8) != old.view(torch.uint8)).view(pool.data.shape[0], -1)
    assert pool.geometry.order is PageOrder.PAGE_FIRST
    return set(differs.any(1).nonzero().flatten().tolist())


@few(6)
@pytest.mark.parametrize("name", [*OFTEN, *EXPERTS])
def test_every_model_by_graphs(name: str, models: Models, tokens: list[int]) -> None:
    running, captures = make_running(models, name)
    before = clear_dummy_pages(running)
    check_logits(run(running, tokens), models, name, tokens)
    if "window" not in name and "gemma" not in name:  # there pages become NaN when they are unseen
        check_pages(running, before)
    four, two, one = captures.graphs
    # 3 steps of three rows and 18 of four and three; the others were no graphs.
    assert (four.replays, two.replays, one.replays) == (21, 1, 2)


def test_sequences_that_are_not_divided(models: Models, tokens: list[int]) -> None:
    """The double says which kernels can be told so."""
    running, _ = make_running(models, "qwen3", splits=AttentionSplits.NONE)
    check_logits(run(running, tokens), models, "qwen3", tokens)


def test_layer_first(models: Models, tokens: list[int]) -> None:
    running, _ = make_running(models, "qwen3", PageOrder.LAYER_FIRST)
    check_logits(run(running, tokens), models, "qwen3", tokens)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_kv_in_fp8_by_graphs(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as without graphs, which rounds the same numbers."""
    use_double(monkeypatch, latents_of=16)
    running, captures = make_running(models, name, kv_dtype=KVDtype.FP8_E4M3)
    assert all(pool.geometry.dtype is FP8 for pool in running.pools)
    got = run(running, tokens)
    assert captures.graphs[0].replays
    eager = ModelRunner(
        models.folder(name),
        "float32",
        "cpu",
        attention=AttentionChoice.FLASHINFER,
        kv_dtype=KVDtype.FP8_E4M3,
    )
    expected = run(Sequences(eager, 5, 60), tokens)
    errors = torch.stack(
        [
            (ours - theirs).norm() / theirs.norm()
            for (*_, ours), (*_, theirs) in zip(got, expected, strict=True)
        ]
    )
    # A sum in another order may round a number to its neighbour in FP8, which is felt by others.
    assert errors.median() < 1e-4
    assert errors.max() < 0.1


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_heads_of_other_dimensions_are_padded(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, chunks, and graphs; pages have zeros behind each head."""
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (8, 48, 64))
    running, captures = make_running(models, name)
    assert {pool.geometry.head_dim for pool in running.pools} == {48}
    check_logits(run(running, tokens), models, name, tokens)
    assert sum(graph.replays for graph in captures.graphs) > 10
    [(pool, table)] = (
        (pool, table)
        for pool, table in zip(running.pools, running.page_tables, strict=True)
        if pool.geometry.window is None
    )
    written = pool.layer(0)[table[0, 0]]
    dim = running._runner.config.pool_layers[0].head_dim
    assert written[..., :dim].any()
    assert not written[..., dim:].any()


def first_page(table: np.ndarray, missing: int, pages: int, _: int) -> np.ndarray:
    return PAD_TABLE(table, missing, pages, table[0, 0])


PAD_TABLE = padding._pad_table


def nothing_is_sent(self: StepBlock, arrays: list[np.ndarray], _: object) -> list[torch.Tensor]:
    """Lets a graph read the arrays that were there when it was captured."""
    return self._views(arrays)


def old_plan(self: GraphStep, _: object) -> bool:
    return self._planned is None


def old_pages(self: GraphPages, *_: object) -> bool:
    return self._held is not None


def first_slots(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = NEW_TOKEN_SLOTS(*arguments)
    return pages, np.zeros_like(slots)


NEW_TOKEN_SLOTS = PaddedBatch.new_token_slots


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (padding, "_pad_table", first_page),
        (StepBlock, "send", nothing_is_sent),
        (PaddedBatch, "new_token_slots", first_slots),
        (GraphStep, "_needs_plan", old_plan),
        (GraphPages, "_holds", old_pages),
    ],
    ids=["no_dummy_page", "arrays", "slots", "plans", "pages"],
)
def test_planted_faults_are_found(
    owner: object,
    name: str,
    fault: object,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, _ = make_running(models, "llama")
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, IndexError)):
        check_logits(run(running, tokens), models, "llama", tokens)


def test_padding_on_a_page_that_nobody_has_yet_is_found(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens may be right meanwhile: the page is another request's next."""
    running, _ = make_running(models, "llama")
    free = set(range(running.pools[0].total_pages - 1)) - set(running.page_tables[0].ravel())
    before = clear_dummy_pages(running)
    monkeypatch.setattr(
        padding, "_pad_table", lambda table, n, pages, _: PAD_TABLE(table, n, pages, min(free))
    )
    monkeypatch.setattr(
        PaddedBatch,
        "new_token_slots",
        lambda self, table, size, _: NEW_TOKEN_SLOTS(self, table, size, min(free)),
    )
    check_logits(run(running, tokens), models, "llama", tokens)
    with pytest.raises(AssertionError):
        check_pages(running, before)


def test_the_largest_is_captured_first_and_memory_is_counted_before(models: Models) -> None:
    captures = Captures()
    runner = ModelRunner(
        models.folder("gemma3"),
        "float32",
        "cpu",
        attention=AttentionChoice.FLASHINFER,
        graphs=GRAPHS,
        capture=captures,
    )
    flashinfer = attention_of(runner)._flashinfer
    assert flashinfer is not None
    counted = flashinfer.nbytes
    plain = ModelRunner(
        models.folder("gemma3"), "float32", "cpu", attention=AttentionChoice.FLASHINFER
    )
    without = attention_of(plain)._flashinfer
    assert without is not None
    # A wrapper for each size and pool, and their arrays.
    assert counted - without.nbytes > 2 * len(SIZES.sizes) * (8 << 20)
    Sequences(runner, 2, 20)
    runner.capture_graphs()
    assert flashinfer.nbytes == counted
    assert runner._graphs is not None
    assert [shape.size for shape in runner._graphs._graphs] == [4, 2, 1]
    assert len(captures.graphs) == 3


def test_graphs_over_scratch_are_those_that_will_be(models: Models, tokens: list[int]) -> None:
    """They take as much memory, and leave the pools and the later ones alone."""
    captures = Captures()
    runner = ModelRunner(
        models.folder("llama"),
        "float32",
        "cpu",
        attention=AttentionChoice.FLASHINFER,
        graphs=GRAPHS,
        capture=captures,
    )
    scratch = runner.capture_on_scratch()
    assert isinstance(scratch, DecodeGraphs)
    assert len(captures.graphs) == len(SIZES.sizes)
    running = Sequences(runner, 5, 60)
    runner.capture_graphs()
    assert len(captures.graphs) == 2 * len(SIZES.sizes)
    logits = [logits for _, _, logits in run(running, tokens)]
    others = [logits for _, _, logits in run(make_running(models, "llama")[0], tokens)]
    assert all(map(torch.equal, logits, others))
    assert not any(graph.replays for graph in captures.graphs[: len(SIZES.sizes)])


WANTED = replace(GRAPHS, required=False)


@pytest.mark.parametrize(
    ("name", "attention", "said"),
    [(EXPERTS[0], "flashinfer", "not for these experts"), ("llama", "torch", "not torch")],
)
def test_a_model_that_can_have_no_graphs_runs_without(
    name: str,
    attention: str,
    said: str,
    models: Models,
    tokens: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Unless they are required; it says so once."""
    choice, captures = AttentionChoice(attention), Captures()
    options: dict[str, Any] = {"attention": choice, "capture": captures}
    with pytest.raises(UnsupportedOptionError, match=said):
        ModelRunner(models.folder(name), "float32", "cpu", graphs=GRAPHS, **options)
    runner = ModelRunner(models.folder(name), "float32", "cpu", graphs=WANTED, **options)
    assert runner.capture_on_scratch() is None
    running = Sequences(runner, 5, 60)
    runner.capture_graphs()
    assert [said in record.message for record in caplog.records] == [True]
    assert not captures.graphs
    assert runner.dummy_pages == 0
    check_logits(run(running, tokens), models, name, tokens)


@pytest.mark.parametrize("at", [0, 2, 4], ids=["first", "last_of_scratch", "over_the_pools"])
def test_a_capture_that_fails_leaves_a_model_without_graphs(
    at: int, models: Models, tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def capture(work: Callable[[], object]) -> Recording:
        tried.append(at)
        if len(tried) > at:
            raise torch.OutOfMemoryError("no memory for a graph")
        return graph_double.capture(work)

    options: dict[str, Any] = {"attention": AttentionChoice.FLASHINFER, "capture": lambda: capture}
    runner = ModelRunner(models.folder("llama"), "float32", "cpu", graphs=WANTED, **options)
    runner.capture_on_scratch()
    running = Sequences(runner, 5, 60)
    runner.capture_graphs()
    assert len(tried) == at + 1, "not again"
    assert ["no memory for a graph" in one.message for one in caplog.records] == [True]
    check_logits(run(running, tokens), models, "llama", tokens)
    required = ModelRunner(models.folder("llama"), "float32", "cpu", graphs=GRAPHS, **options)
    Sequences(required, 5, 60)
    with pytest.raises(torch.OutOfMemoryError):
        required.capture_graphs()


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_whatever_flashinfer_refuses_leaves_a_model_without_graphs(
    error: type[Exception], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has their memory back. A wrong line of ours ends the start."""

    def capture_all(_: DecodeGraphs) -> None:
        raise error("no such plan")

    folder = models.folder("llama")
    options: dict[str, Any] = {"attention": AttentionChoice.FLASHINFER}
    plain, runner, wrong = (
        ModelRunner(folder, "float32", "cpu", graphs=graphs, capture=Captures(), **options)
        for graphs in (None, WANTED, WANTED)
    )
    monkeypatch.setattr(DecodeGraphs, "capture_all", capture_all)
    flashinfer, without = attention_of(runner)._flashinfer, attention_of(plain)._flashinfer
    assert flashinfer is not None
    assert without is not None
    assert runner.capture_on_scratch() is None
    assert runner.dummy_pages == 0
    assert flashinfer.nbytes == without.nbytes
    monkeypatch.setattr(runner_module, "_PACKAGE", __name__.partition(".")[0])
    if error is AssertionError:
        with pytest.raises(AssertionError, match="no such plan"):
            wrong.capture_on_scratch()
    else:
        assert wrong.capture_on_scratch() is None


def test_all_graphs_write_the_same_logits(models: Models) -> None:
    """Of their own they would keep memory for the sum of all sizes."""
    running, captures = make_running(models, "llama")
    graphs = running._runner._graphs
    assert graphs is not None
    kept = [one.logits for one in graphs._graphs.values()]
    assert [len(one) for one in kept] == [4, 2, 1]
    assert len({one.untyped_storage().data_ptr() for one in kept}) == 1
    assert kept[0].untyped_storage().nbytes() == 4 * VOCAB_SIZE * 4
    assert len(captures.graphs) == 3


def test_logits_stay_when_the_next_step_is_launched(models: Models, tokens: list[int]) -> None:
    running, _ = make_running(models, "llama")
    running.forward({0: tokens[:9]}, [])
    first = running.forward({0: tokens[9:10]})
    running.forward({0: tokens[10:11]})
    assert_close(first, models.logits("llama", tokens[:10])[-1:])


def test_only_the_asked_rows(models: Models, tokens: list[int]) -> None:
    running, captures = make_running(models, "llama")
    running.forward({0: tokens[:9], 1: tokens[1:8]}, [])
    got = running.forward({0: tokens[9:10], 1: tokens[8:9]}, [1])
    assert_close(got, models.logits("llama", tokens[1:9])[-1:])
    assert running.forward({0: tokens[10:11], 1: tokens[9:10]}, []).shape == (0, 131)
    assert captures.graphs[1].replays == 2


def test_other_pools_need_other_graphs(models: Models, tokens: list[int]) -> None:
    """Addresses are in them: after `bind` nothing is launched over the old pools."""
    running, captures = make_running(models, "llama")
    other = Sequences(running._runner, 1, 20)
    old = running.pools[0].data.clone()
    other.forward({0: tokens[:3]})
    got = other.forward({0: tokens[3:4]})
    assert_close(got, models.logits("llama", tokens[:4])[-1:])
    assert torch.equal(running.pools[0].data.nan_to_num(7), old.nan_to_num(7))
    assert not any(one.replays for one in captures.graphs)


def test_a_draft_model_may_have_graphs_where_its_target_has_none(models: Models) -> None:
    options: dict[str, Any] = {
        "attention": AttentionChoice.FLASHINFER,
        "graphs": GraphOptions(SIZES, page_size=3, required=False),
    }
    target = ModelRunner(models.folder("deepseek-v2-experts"), "float32", "cpu", **options)
    draft = DraftModel(models.folder("llama"), "float32", "cpu", **options)
    assert (target.dummy_pages, draft.dummy_pages) == (0, 1)
    assert count_dummy_pages(target, draft) == 1
    assert count_dummy_pages(target, None) == 0


def test_a_draft_model_guesses_by_graphs(models: Models, tokens: list[int]) -> None:
    """All guesses but the first, as without graphs."""
    table = np.random.default_rng(3).permutation(59)[:45].reshape(3, 15).astype(np.int32)
    drafting = [
        DraftRequest(SamplingRow(SamplingParams(temperature=0), n, tokens[:n], ()), tokens[:n], 4)
        for n in (5, 9, 2)
    ]
    proposals = []
    for graphs in (GRAPHS, None):
        captures = Captures()
        draft = DraftModel(
            models.folder("llama"),
            "float32",
            "cpu",
            AttentionChoice.FLASHINFER,
            graphs=graphs,
            capture=captures,
        )
        (geometry,) = draft.make_geometries(3)
        draft.bind([KVPool(geometry, 60, torch.device("cpu"), reserved_pages=1)])
        draft.warm_up()
        draft.capture_graphs()
        proposals.append(draft.propose(drafting, [table]))
        assert [one.replays for one in captures.graphs] == ([3, 0, 0] if graphs else [])
    assert proposals[0] == proposals[1]


def test_longer_sequences_than_there_is_room_for(models: Models, tokens: list[int]) -> None:
    """Those of a draft model, whose target's may be longer."""
    running, captures = make_running(models, "llama")
    graphs = running._runner._graphs
    assert graphs is not None
    graphs._room = replace(graphs._room, max_tokens=11)
    running.forward({0: tokens[:10]})
    running.forward({0: tokens[10:11]})
    got = running.forward({0: tokens[11:12]})
    assert_close(got, models.logits("llama", tokens[:12])[-1:])
    assert captures.graphs[-1].replays == 1


@pytest.mark.parametrize("attention", ["cpu", "torch", "auto"])
def test_other_attention_is_refused(attention: str, models: Models) -> None:
    with pytest.raises(UnsupportedOptionError, match="--cuda-graphs decode: they need --attention"):
        ModelRunner(
            models.folder("llama"),
            "float32",
            "cpu",
            attention=AttentionChoice(attention),
            graphs=GRAPHS,
        )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 4)),
        (4, (1, 2, 4)),
        (9, (1, 2, 4, 8, 16)),
        (64, (1, 2, 4, *range(8, 65, 8))),
        (260, (1, 2, 4, *range(8, 257, 8), 272)),
        (5000, (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))),
    ],
)
def test_usual_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert GraphSizes.up_to(most).sizes == sizes


def test_the_next_larger_size_is_taken() -> None:
    sizes = GraphSizes.parse("8,2, 4,2")
    assert sizes.sizes == (2, 4, 8)
    assert sizes.largest == 8
    assert sizes.below(3).sizes == (2, 4)
    assert sizes.below(4).sizes == (2, 4)
    assert sizes.below(9).sizes == (2, 4, 8)
    assert [sizes.of(n) for n in (0, 1, 2, 3, 8, 9)] == [None, 2, 2, 4, 8, None]


@pytest.mark.parametrize("text", ["", "a", "1;2", "0,4", "-1"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        GraphSizes.parse(text)


def test_padded_batch() -> None:
    batch = ForwardBatch(
        np.array([5, 6]),
        np.array([9, 0]),
        np.array([0, 1, 2], np.int32),
        np.array([10, 1], np.int32),
        (np.array([[3, 4, -1], [5, -1, -1]], np.int32),),
        np.array([1]),
    )
    assert tokens_each(batch) == 1
    padded = pad_batch(batch, GraphShape(4, 1), [11], page_size=9)
    assert tokens_each(padded.batch) == 1
    assert padded.batch.input_ids.tolist() == [5, 6, 0, 0]
    assert padded.batch.positions.tolist() == [9, 0, 0, 0]
    assert padded.batch.seq_lens.tolist() == [10, 1, 1, 1]
    assert padded.batch.page_tables[0][:, 0].tolist() == [3, 5, 11, 11]
    assert padded.rows.tolist() == [0, 1, 2, 3]
    assert tokens_each(replace(batch, query_start=np.array([0, 0, 2], np.int32))) == 0
    assert tokens_each(empty_batch(1, 1)) == 0


def test_tokens_that_the_host_does_not_know_are_put_into_a_graph(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a padded one, from another order; and nobody waits for the device."""
    running, captures = make_running(models, "llama")
    running.forward({0: tokens[:9], 1: tokens[:4], 2: tokens[:2]})
    known = running.batch({1: tokens[4:5], 0: tokens[9:10], 2: tokens[2:3]})
    expected = running._runner.forward(known)
    monkeypatch.setattr(runner_module, "wait_for_device", pytest.fail)
    unknown = known.input_ids.copy()
    unknown[[0, 1]] = -1
    sampled = torch.tensor([tokens[9], 3, tokens[4]])
    pending = PendingIds(np.array([0, 1]), np.array([2, 0]), sampled)
    replays = sum(graph.replays for graph in captures.graphs)
    got = running._runner.launch(replace(known, input_ids=unknown, pending=pending))
    assert torch.equal(got, expected)
    assert sum(graph.replays for graph in captures.graphs) == replays + 1


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_a_graph_is_planned_when_the_plan_before_has_been_copied(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And, but for latents, only when a sequence has another number of pages: of three tokens."""
    log: list[str] = []

    class Copied:
        def passed(self) -> bool:
            return False

        def wait(self) -> None:
            log.append("wait")

    def record(_: torch.device) -> Copied:
        log.append("record")
        return Copied()

    replan = FlashInferAttention.replan_decode

    def log_plan(*arguments: Any) -> None:
        log.append("plan")
        replan(*arguments)

    monkeypatch.setattr(runner_module, "record_event", record)
    monkeypatch.setattr(FlashInferAttention, "replan_decode", log_plan)
    running, _ = make_running(models, name)
    running.forward({0: tokens[:8], 1: tokens[:5]})
    log.clear()
    for step in range(4):  # of 9 and 6 tokens, then of one page more
        running.forward({0: tokens[8 + step : 9 + step], 1: tokens[5 + step : 6 + step]})
    planned, kept = ["wait", "plan", "record"], ["record"]
    third = planned if name == "deepseek-v3" else kept
    assert log == [*planned, *planned, *third, *third]
