"""Every model on "cuda:0" without one: a tensor on another device, or of another dtype, fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvrelay.model_runner import batch
from kvrelay.model_runner.attention import flashinfer_attention
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.flashinfer_attention import (
    FlashInfer,
    FlashInferStepAttention,
)
from kvrelay.model_runner.attention.paged_plan import PagedPlan
from kvrelay.model_runner.batch import PendingIds
from kvrelay.model_runner.layers.elementwise import Rotation
from kvrelay.model_runner.layers.rotary_embedding import RotaryEmbedding
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling import device_sampler
from kvrelay.model_runner.sampling.sampler import SamplingRow
from kvrelay.model_runner.sampling.token_counts import CountChanges, TokenCounts
from kvrelay.model_runner.torch_options import pin_to_device
from kvrelay.wire.submit import SamplingParams
from tests.model_runner.fake_cuda import DEVICE, fake_cuda
from tests.model_runner.sequences import Sequences
from tests.model_runner.test_decoder import EXPERTS, NAMES
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.tiny_models import VOCAB_SIZE, Models
from tests.pairwise import few

sampling_triton = pytest.importorskip(
    "kvrelay.model_runner.sampling.sampling_triton", exc_type=ImportError
)


pytestmark = pytest.mark.usefixtures("guard")


CALLS = ["edit_rows", "penalize_rows", "sample_rows", "score_rows"]


class CheckedKernels:
    """The kernels of `sampling_triton`, which read by addresses: only what they need is checked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def edit_rows(
        self, logits: torch.Tensor, edits: torch.Tensor, biases: torch.Tensor, floats: torch.Tensor
    ) -> None:
        self._check(logits, torch.float32, (len(logits), VOCAB_SIZE))
        self._check(edits, torch.int64, (len(edits), sampling_triton.EDIT_INTS))
        self._check(biases, torch.float32, (len(edits),))
        self._check(floats, torch.float64, (len(logits), sampling_triton.FLOATS))
        self.calls.append("edit_rows")

    def penalize_rows(
        self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, floats: torch.Tensor
    ) -> None:
        self._check(logits, torch.float32, (len(logits), VOCAB_SIZE))
        self._check(rows, torch.int64, (len(rows), 2))
        self._check(counts, torch.int32, (len(counts), VOCAB_SIZE))
        self._check(floats, torch.float64, (len(logits), sampling_triton.FLOATS))
        self.calls.append("penalize_rows")

    def sample_rows(
        self,
        logits: torch.Tensor,
        masks: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        largest: torch.Tensor,
    ) -> None:
        count = len(logits)
        self._check(logits, torch.float32, (count, VOCAB_SIZE))
        self._check(masks, torch.int32, (len(masks), -(-VOCAB_SIZE // 32)))
        self._check(ints, torch.int64, (count, sampling_triton.INTS))
        self._check(floats, torch.float64, (count, sampling_triton.FLOATS))
        self._check(weights, torch.float32, (count, VOCAB_SIZE))
        self._check(ids, torch.int64, (count,))
        self._check(largest, torch.float32, (count,))
        self.calls.append("sample_rows")

    def score_rows(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        totals: torch.Tensor,
        tops: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self._check(logits, torch.float32, (len(logits), VOCAB_SIZE))
        self._check(rows, torch.int64, (len(rows), 2))
        self._check(ids, torch.int64, (len(logits),))
        self._check(totals, torch.float64, (len(rows),))
        self._check(tops, torch.int64, tuple(tops.shape))
        self._check(values, torch.float32, (len(rows), tops.shape[1]))
        self.calls.append("score_rows")

    def _check(self, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        assert tensor.device == DEVICE, "another device"
        assert tensor.dtype is dtype
        assert tensor.shape == shape
        assert tensor.is_contiguous()


def sample_on_device(logits: torch.Tensor) -> list[str]:
    """Launch rows of every kind; the names of the kernels that were."""
    assert device_sampler.samples_on(logits.device)
    params = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5, logprobs=2)
    row = SamplingRow(params, 9, (1, 2), (3,), allowed=np.ones((1, -(-VOCAB_SIZE // 32)), np.int32))
    kernels = CheckedKernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampler, "_kernels", lambda: kernels)
        rows = [row, *[SamplingRow(SamplingParams(), 9, (), ())] * (len(logits) - 1)]
        rows[-1] = SamplingRow(params, 9, (), (), counted_row=1)
        draws = device_sampler.launch(logits, rows, counts=count_tokens().entries)
    assert draws.ids.device == draws.largest.device == DEVICE
    return kernels.calls


@pytest.mark.parametrize("masked", [0, 2])
def test_masks_are_sent_for_rows_with_a_grammar_alone(
    masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        sent.append(array.nbytes)
        return pin_to_device(array, device)

    mask = np.ones((1, -(-VOCAB_SIZE // 32)), np.int32)
    plain = SamplingRow(SamplingParams(top_p=0.9), 9, (), ())
    rows = [replace(plain, allowed=mask)] * masked + [plain] * (5 - masked)
    monkeypatch.setattr(device_sampler, "pin_to_device", send)
    monkeypatch.setattr(device_sampler, "_kernels", CheckedKernels)
    with fake_cuda(monkeypatch):
        device_sampler.launch(torch.empty(5, VOCAB_SIZE, device=DEVICE), rows)
    numbers = 5 * (6 + 5) * 8  # of all rows, by one copy
    assert sent == ([masked * mask.nbytes, numbers] if masked else [numbers])


def count_tokens() -> TokenCounts:
    """Change counts in all ways."""
    counts, some = TokenCounts(3, VOCAB_SIZE, DEVICE), np.arange(4)
    awaited = np.array([[VOCAB_SIZE], [1]])
    sampled = torch.empty(2, dtype=torch.int64, device=DEVICE)
    counts.change(CountChanges(some[:2], some, some, awaited), sampled)
    return counts


def run_on_device(folder: Path, attention: str, tokens: list[int]) -> None:
    """Prompts, chunks beside them, drafts that are verified, and tokens one by one."""
    runner = ModelRunner(folder, "bfloat16", "cuda:0", attention=AttentionChoice(attention))
    running = Sequences(runner, 3, 60)
    runner.warm_up()
    steps: list[dict[int, Sequence[int]]] = [
        {0: tokens[:20], 1: tokens[:3]},
        {0: tokens[20:40], 1: tokens[3:8], 2: tokens[:1]},
        {0: tokens[40:41], 2: tokens[1:2]},
    ]
    for new in steps:
        logits = running.forward(new)
        assert isinstance(logits, FakeTensor)
        assert logits.device == DEVICE
        assert logits.dtype is torch.float32
        assert logits.shape == (sum(map(len, new.values())), VOCAB_SIZE)
        assert sample_on_device(logits) == CALLS


@few(8)
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "flashinfer") for name in (*NAMES, *EXPERTS)),
        *((name, "torch") for name in ("llama", "mistral-window", "gemma2", "deepseek-v2")),
    ],
)
def test_every_model_runs_on_a_device(
    name: str, attention: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder(name)
    use_double(monkeypatch)
    with fake_cuda(monkeypatch):
        run_on_device(folder, attention, tokens)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v2"])
def test_tokens_that_the_host_does_not_know_are_taken_on_the_device(
    name: str, models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the largest step runs there, whose memory is measured."""
    folder = models.folder(name)
    use_double(monkeypatch)
    with fake_cuda(monkeypatch):
        runner = ModelRunner(folder, "bfloat16", "cuda:0", attention=AttentionChoice.FLASHINFER)
        assert runner.run_largest(20, 3, 60).shape == (23, VOCAB_SIZE)
        running, sampled = Sequences(runner, 2, 60), torch.zeros(2, dtype=torch.int64)
        running.forward({0: tokens[:5], 1: tokens[:3]})
        unknown = running.batch({0: [-1], 1: [-1]})
        places = np.arange(2)
        pending = PendingIds(places, places[::-1].copy(), sampled.to(DEVICE))
        logits = runner.launch(replace(unknown, pending=pending))
        assert (logits.device, logits.shape) == (DEVICE, (2, VOCAB_SIZE))
        on_host = PendingIds(places, places, sampled)
        with pytest.raises((AssertionError, RuntimeError), match="device"):
            runner.launch(replace(unknown, pending=on_host))


class Operations(TorchDispatchMode):
    """Counts what is launched on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += DEVICE in {one.device for one in tree_leaves(args) if hasattr(one, "device")}
        return func(*args, **(kwargs or {}))


def test_heads_of_any_dimensions_take_as_many_launches_for_any_number_of_rows(
    models: Models, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are padded; in plain torch each row has launches of its own."""
    folder = models.folder("llama")
    use_double(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "HEAD_DIMS", (64, 128, 256))

    def count_launches(attention: AttentionChoice, *rows: int) -> list[int]:
        runner = ModelRunner(folder, "bfloat16", "cuda:0", attention=attention)
        running, counts = Sequences(runner, 5, 20), []
        for number in rows:
            with Operations() as operations:
                running.forward(dict.fromkeys(range(number), tokens[:1]))
            counts.append(operations.count)
        return counts

    with fake_cuda(monkeypatch):
        few, many = count_launches(AttentionChoice.FLASHINFER, 2, 5)
        [plain] = count_launches(AttentionChoice.TORCH, 5)
    assert many == few
    assert plain > 2 * many


ATTEND = FlashInferStepAttention.attend


def _device_tensor(_: object, array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)


def _wide_tensor(_: object, array: np.ndarray[Any, Any]) -> torch.Tensor:
    with unset_fake_temporarily():
        return torch.from_numpy(array.astype(np.int64))


def _host_page_ids(_: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
    return torch.zeros(int(plan.kv_indptr[-1]), dtype=torch.int32)


def _host_rotation(_: RotaryEmbedding, positions: torch.Tensor) -> Rotation:
    return Rotation(torch.ones(len(positions), 8), torch.ones(len(positions), 8))


def _cut_attend(
    self: FlashInferStepAttention, layer: int, rows: torch.Tensor, _: None
) -> torch.Tensor:
    """Heads in the order of columns: kernels would read other numbers."""
    return ATTEND(self, layer, rows.transpose(1, 2).contiguous().transpose(1, 2))


def _wide_attend(
    self: FlashInferStepAttention, layer: int, rows: torch.Tensor, _: None
) -> torch.Tensor:
    return ATTEND(self, layer, rows.float())


@pytest.mark.parametrize(
    ("owner", "name", "fault", "message"),
    [
        (batch, "to_device", lambda array, _: torch.from_numpy(array), "two.* devices"),
        (RotaryEmbedding, "__call__", _host_rotation, "another device"),
        (FlashInfer, "to_host", _device_tensor, "wait for a copy to the host"),
        (FlashInfer, "to_host", _wide_tensor, "int32"),
        (flashinfer_attention, "gather_page_ids", _host_page_ids, "page ids on another device"),
        (FlashInferStepAttention, "attend", _cut_attend, "stride"),
        (FlashInferStepAttention, "attend", _wide_attend, "dtype"),
        (device_sampler, "pin_to_device", lambda array, _: torch.from_numpy(array), "device"),
    ],
    ids=[
        "ids",
        "rotation",
        "plan_on_device",
        "plan_in_int64",
        "page_ids",
        "strides",
        "dtype",
        "sampling",
    ],
)
def test_planted_faults_are_found(
    owner: object,
    name: str,
    fault: object,
    message: str,
    models: Models,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = models.folder("llama")
    use_double(monkeypatch)
    with fake_cuda(monkeypatch):
        monkeypatch.setattr(owner, name, fault)
        with pytest.raises((AssertionError, RuntimeError), match=message):
            run_on_device(folder, "flashinfer", tokens)
