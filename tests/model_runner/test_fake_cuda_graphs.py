"""What is captured into graphs on "cuda:0" without one: nothing of it touches the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.flashinfer_attention import FlashInfer, FlashInferAttention
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.batch import PendingIds
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphSizes
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.decoder import Decoder
from kvrelay.model_runner.layers.feed_forward import MoEFeedForward
from kvrelay.model_runner.layers.rotary_embedding import RotaryEmbedding
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fake_cuda import DEVICE, fake_cuda
from tests.model_runner.fp8_models import FORMATS, SINGLE, write_fp8
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_decoder import EXPERTS, OFTEN
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import VOCAB_SIZE, Models
from tests.pairwise import few

pytestmark = pytest.mark.usefixtures("guard")


class OnDevice(TorchDispatchMode):
    """Fails where an operation reads or makes a tensor of the host, or the host waits for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                assert leaf.device == DEVICE, f"{func} of the host"
        return result


class Replays:
    """In place of a graph: counts."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


class CheckedCapture:
    """In place of `CudaCapture`."""

    def __init__(self) -> None:
        self.made: list[Replays] = []

    def __call__(self) -> Callable[[Callable[[], object]], Replays]:
        return self._capture

    def _capture(self, work: Callable[[], object]) -> Replays:
        with OnDevice():
            work()
        self.made.append(Replays())
        return self.made[-1]


def make_running(
    folder: Path,
    kv_dtype: KVDtype,
    capture: CheckedCapture,
    most_each: int = 1,
    moe_backend: MoEBackend = MoEBackend.AUTO,
) -> Sequences:
    """Three sequences, and the graphs of 4 and 1."""
    runner = ModelRunner(
        folder,
        "bfloat16",
        "cuda:0",
        attention=AttentionChoice.FLASHINFER,
        kv_dtype=kv_dtype,
        graphs=GraphOptions(GraphSizes((1, 4)), page_size=3, most_each=most_each),
        capture=capture,
        moe_backend=moe_backend,
    )
    running = Sequences(runner, 3, 60)
    runner.warm_up()
    runner.capture_graphs()
    return running


def run_graphs(
    folder: Path,
    tokens: list[int],
    kv_dtype: KVDtype = KVDtype.AUTO,
    moe_backend: MoEBackend = MoEBackend.AUTO,
) -> list[int]:
    """Two sequences by the graphs of four; how often each graph was launched."""
    capture = CheckedCapture()
    running = make_running(folder, kv_dtype, capture, 3, moe_backend)
    running.forward({0: tokens[:9], 1: tokens[:3]})
    for step, drafts in enumerate([0, 0, 2]):
        new: dict[int, Sequence[int]] = {
            0: tokens[9 + step : 10 + step + drafts],
            1: tokens[3 + step : 4 + step],
        }
        logits = running.forward(new)
        assert isinstance(logits, FakeTensor)
        assert logits.device == DEVICE
        assert logits.dtype is torch.float32
        assert logits.shape == (2 + drafts, VOCAB_SIZE)
    running.forward({1: tokens[6:7]})
    return [one.count for one in capture.made]


@few(4)
@pytest.mark.parametrize("name", [*OFTEN, *EXPERTS])
def test_every_model_is_captured_without_the_host(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder(name)
    use_double(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with fake_cuda(monkeypatch):
        # Of four with drafts, four, one with drafts, one.
        assert run_graphs(folder, tokens) == [1, 2, 0, 1]


def test_graphs_ask_for_the_experts_own_scheme(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever else is in FP8."""
    folder, plain = write_fp8(models.folder(EXPERTS[0]), FORMATS["fp8-tensor"], tmp_path)
    options = GraphOptions(GraphSizes((1,)), page_size=3)
    attention = AttentionChoice.FLASHINFER
    use_double(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    refused = pytest.raises(UnsupportedOptionError, match="in FP8 the host chooses")
    with fake_cuda(monkeypatch), refused:
        ModelRunner(folder, "bfloat16", "cuda:0", attention=attention, graphs=options)
    weights = load_file(plain / SINGLE)
    of_attention = {
        name: one for name, one in load_file(folder / SINGLE).items() if "self_attn" in name
    }
    save_file({**weights, **of_attention}, folder / SINGLE)
    with fake_cuda(monkeypatch):
        runner = ModelRunner(folder, "bfloat16", "cuda:0", attention=attention, graphs=options)
    assert runner.dummy_pages == 1


@pytest.mark.parametrize("form", [None, "fp8-block"])
def test_experts_by_flashinfer(
    form: str | None,
    models: Models,
    tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = models.folder("deepseek-v3-experts")
    if form is not None:
        folder, _ = write_fp8(folder, FORMATS[form], tmp_path)
    use_double(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with fake_cuda(monkeypatch):
        counts = run_graphs(folder, tokens, moe_backend=MoEBackend.FLASHINFER)
    assert counts == [1, 2, 0, 1]


def test_experts_take_as_many_launches_for_any_number_of_tokens(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of a layer's ten is an expert's own, and nothing comes from the host."""
    folder = models.folder("deepseek-v3-experts")
    use_double(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with fake_cuda(monkeypatch):
        runner = make_running(folder, KVDtype.AUTO, CheckedCapture())._runner
        assert isinstance(runner._decoder, Decoder)
        mixture = runner._decoder._layers[-1]._feed_forward
        assert isinstance(mixture, MoEFeedForward)
        for count in (1, 40):
            x = torch.empty(count, 64, dtype=torch.bfloat16, device=DEVICE)
            chosen = torch.zeros(count, 3, dtype=torch.int64, device=DEVICE)
            with OnDevice(), Traffic() as traffic:
                mixture._experts(x, chosen, torch.empty(count, 3, device=DEVICE))
            assert (traffic.copies, traffic.launches) == (0, 10)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_kv_in_fp8(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder(name)
    use_double(monkeypatch, latents_of=16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with fake_cuda(monkeypatch):
        assert run_graphs(folder, tokens, KVDtype.FP8_E4M3) == [1, 2, 0, 1]


class Traffic(TorchDispatchMode):
    """Counts copies from the host, each of a pinned piece, and launches beside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = any(one is not None and not one.is_write for one in aliases)
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if is_view or not made or made[0].device != DEVICE or func.__name__.startswith("empty"):
            return result
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.device.type == "cpu" and one.dim() for one in given):
            self.copies += 1
        else:
            self.launches += 1
        return result


@pytest.mark.parametrize(
    ("name", "kept", "crossed"),
    [("llama", (1, 3, 0), (1, 10, 1)), ("deepseek-v3", (1, 3, 1), (1, 10, 1))],
)
def test_a_step_is_one_copy_from_the_host(
    name: str,
    kept: tuple[int, int, int],
    crossed: tuple[int, int, int],
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two launches put awaited tokens into it, and one saves its logits.

    Where a sequence begins a page, two more write it to the page table, five gather page ids, and
    FlashInfer plans. Latents are planned for each step.
    """
    folder, planned = models.folder(name), list[object]()
    use_double(monkeypatch)
    replan = FlashInferAttention.replan_decode

    def count_plan(*arguments: Any) -> None:
        planned.append(arguments)
        replan(*arguments)

    monkeypatch.setattr(FlashInferAttention, "replan_decode", count_plan)
    with fake_cuda(monkeypatch):
        running = make_running(folder, KVDtype.AUTO, CheckedCapture())
        running.forward({0: tokens[:9], 1: tokens[:3]})
        counts = []
        for step in range(6):
            batch = running.batch({0: tokens[9 + step : 10 + step], 1: tokens[3 + step : 4 + step]})
            sampled = torch.zeros(2, dtype=torch.int64, device=DEVICE)
            pending = PendingIds(np.arange(2), np.arange(2), sampled)
            planned.clear()
            with Traffic() as traffic:
                running._runner.launch(replace(batch, pending=pending))
            counts.append((traffic.copies, traffic.launches, len(planned)))
    # The first step sends the whole page table, too.
    assert counts[0] == (2, 8, 1)
    assert counts[1:] == [kept, kept, crossed, kept, kept]


@few(1)
@pytest.mark.parametrize(
    ("name", "eager", "graph"),
    [("llama", (6, 32, 3), (2, 8, 0)), ("deepseek-v3", (6, 74, 3), (1, 8, 0))],
)
def test_a_step_with_drafts_is_one_copy_from_the_host(
    name: str,
    eager: tuple[int, int, int],
    graph: tuple[int, int, int],
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashInfer's plan of keys and values copies the starts of queries once more.

    Launches are those of two layers without attention, and beside a graph.
    """
    folder, counts = models.folder(name), []
    use_double(monkeypatch)
    for most_each in (1, 4):
        with monkeypatch.context() as patch, fake_cuda(patch):
            running = make_running(folder, KVDtype.AUTO, CheckedCapture(), most_each)
            pinned = count_pinned(patch)
            running.forward({0: tokens[:9], 1: tokens[:6]})
            for _ in range(3):
                ends = running.seq_lens
                new: dict[int, Sequence[int]] = {
                    0: tokens[ends[0] : ends[0] + 4],
                    1: tokens[ends[1] : ends[1] + 1],
                }
                batch = running.batch(new)
                pinned.clear()
                with Traffic() as traffic:
                    running._runner.launch(batch)
            counts.append((traffic.copies, traffic.launches, len(pinned)))
    assert counts == [eager, graph]


def count_pinned(patch: pytest.MonkeyPatch) -> list[object]:
    """A line for each array that is pinned by itself for a plan."""
    pinned, to_host = list[object](), FlashInfer.to_host

    def pin(self: FlashInfer, array: np.ndarray[Any, Any]) -> torch.Tensor:
        pinned.append(array)
        return to_host(self, array)

    patch.setattr(FlashInfer, "to_host", pin)
    return pinned


def _host_positions(self: RotaryEmbedding, positions: torch.Tensor) -> object:
    """Positions by way of the host, as in steps that are launched kernel by kernel."""
    copied = torch.from_numpy(np.zeros(len(positions), np.int64)).to(DEVICE)
    return ROTATE(self, copied)


ROTATE = RotaryEmbedding.__call__


def test_a_copy_from_the_host_is_found(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder("gemma2")
    use_double(monkeypatch)
    monkeypatch.setattr(RotaryEmbedding, "__call__", _host_positions)
    with fake_cuda(monkeypatch), pytest.raises(AssertionError, match="of the host"):
        run_graphs(folder, tokens)
