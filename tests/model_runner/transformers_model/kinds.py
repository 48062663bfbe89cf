"""Small models of every kind of causal language model that transformers has, and how they fare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.transformers_model.configuration import (
    TransformersConfig,
    quietly,
    read_transformers_config,
)
from kvrelay.model_runner.transformers_model.own_parts import OwnExperts
from kvrelay.model_runner.transformers_model.refusals import ModelCodeError
from kvrelay.model_runner.transformers_model.self_proof import plain_logits
from kvrelay.model_runner.transformers_model.small_model import make_small_model, shrink
from kvrelay.model_runner.transformers_model.transformers_decoder import TransformersDecoder
from tests.model_runner.sequences import Sequences

RESULTS = Path("docs/models.json")
"""What was found, a row a kind; docs/models.md shows it."""
SAME = 1e-4
"""The largest difference of logits, as a part of the largest logit."""

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _DEFAULT_ROPE, "sliding_attention": _DEFAULT_ROPE}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _DEFAULT_ROPE,
    },
    "deepseek_v2": _EXPERTS,
    **{one: {"head_dim": 128} for one in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "dots1": {**_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
"""What the default configuration of a kind lacks."""


@dataclass(frozen=True, slots=True)
class Found:
    """A kind, and how it fared."""

    kind: str
    architecture: str
    refusal: str = ""
    """Why it is refused; empty: it is served."""
    pools: tuple[str, ...] = ()
    attention: str = ""
    """Whether our kernels compute all of its attention."""
    experts: str = ""
    """Whose code computes its experts, own or theirs; empty: it has none."""
    difference: float = 0.0
    """From its own forward, as a part of the largest logit."""


def all_kinds() -> dict[str, str]:
    """Every kind with the name of its class; of kinds that share a class the one like its name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds: dict[str, str] = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names[0] if isinstance(names, tuple) else names
        plain = kind.removesuffix("_text").replace("_", "").replace("-", "")
        if name not in kinds or name.lower().replace("_", "").startswith(plain):
            kinds[name] = kind
    return {kind: name for name, kind in kinds.items()}


def small_config(kind: str, **changes: Any) -> Any:
    """The configuration of a small model of a kind, from what transformers takes by default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    decoder = {"is_decoder": True} if "is_decoder" in cls.__dataclass_fields__ else {}
    return shrink(cls(**(decoder | CHANGES.get(kind, {}) | changes)))


def save_small(kind: str, folder: Path, **changes: Any) -> Any:
    """A small random model of a kind, saved with the published names of its tensors."""
    model = make_small_model(small_config(kind, **changes), all_kinds()[kind], seed=2)
    with quietly():
        model.save_pretrained(folder)
    return model


def serve(folder: Path, dtype: str = "float32") -> ModelRunner:
    """A runner of a saved model by transformers' code."""
    return ModelRunner(folder, dtype, "cpu", model_code=ModelCode.TRANSFORMERS)


def find(kind: str, folder: Path) -> Found:
    """Serve a small model of a kind, and compare its logits with its own forward's."""
    architecture = all_kinds()[kind]
    try:
        model = save_small(kind, folder)
    # Configurations and models raise whatever they meet.
    except Exception as error:
        return Found(kind, architecture, _refusal_of_default(kind, folder) or _shortly(error))
    try:
        runner = serve(folder)
    except CheckpointError as error:
        return Found(kind, architecture, _shortly(error))
    config = runner.config
    assert isinstance(config, TransformersConfig)
    by_kernels = all(call.in_kernels for call in config.layout.calls)
    return Found(
        kind,
        architecture,
        pools=tuple(geometry.pool_name for geometry in runner.make_geometries(16)),
        attention="kernels" if by_kernels and not config.layout.latents else "gathered",
        experts=_experts(runner),
        difference=compare(runner, model),
    )


def _experts(runner: ModelRunner) -> str:
    """See `Found`."""
    assert isinstance(runner._decoder, TransformersDecoder)
    modules = list(runner._decoder._model.modules())
    if any(isinstance(one, OwnExperts) for one in modules):
        return "own"
    names = (type(one).__name__.lower() for one in modules)
    return "theirs" if any("expert" in name or "moe" in name for name in names) else ""


def _refusal_of_default(kind: str, folder: Path) -> str:
    """Why what transformers takes by default is refused, if its configuration says so."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[kind](architectures=[all_kinds()[kind]])
        config.save_pretrained(folder)
        read_transformers_config(folder)
    except Exception as error:
        return _shortly(error)
    return ""


def compare(runner: ModelRunner, model: Any) -> float:
    """The largest difference of logits over ragged steps, as a part of the largest logit."""
    longest = min(runner.max_model_len, 40)
    random = np.random.default_rng(9)
    vocab = runner.config.vocab_size
    texts = [random.integers(3, vocab, n).tolist()[:longest] for n in (40, 17, 5)]
    expected = [plain_logits(model, text) for text in texts]
    running = Sequences(runner, len(texts), longest)
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in steps(texts):
        logits = running.forward(step)
        parts = torch.split(logits, [len(tokens) for tokens in step.values()])
        for index, part in zip(step, parts, strict=True):
            got[index].append(part)
    differences = [
        (torch.cat(parts) - wanted).abs().max() / wanted.abs().max()
        for parts, wanted in zip(got, expected, strict=True)
    ]
    return float(torch.stack(differences).nan_to_num(torch.inf).max())


def steps(texts: Sequence[Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """Chunks of three sequences beside each other, then a token of each a step."""
    done = [0] * len(texts)
    for counts in zip_longest((11, 0, 23), (3, 12), (0, 4), fillvalue=1):
        step = {
            index: texts[index][done[index] : done[index] + count]
            for index, count in enumerate(counts)
            if texts[index][done[index] : done[index] + count]
        }
        yield step
        done = [at + len(step.get(index, ())) for index, at in enumerate(done)]
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        step = {i: text[done[i] : done[i] + 1] for i, text in enumerate(texts) if text[done[i] :]}
        yield step
        done = [at + len(step.get(index, ())) for index, at in enumerate(done)]


def _shortly(error: Exception) -> str:
    """An error without what differs from run to run."""
    text = " ".join(str(error).split()).partition("model code: ")
    unknown = text[0] if isinstance(error, ModelCodeError) else f"{type(error).__name__}: {text[0]}"
    return re.sub(r" \(by .*\)$", "", text[2] or unknown)[:160]


def read_results() -> dict[str, Found]:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {row["kind"]: Found(**{**row, "pools": tuple(row["pools"])}) for row in rows}


def write_results(found: Sequence[Found]) -> None:
    rows = [asdict(one) for one in sorted(found, key=lambda one: one.kind)]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
