"""The modes of each architecture that our code computes, as that code decides them.

Nothing is loaded. Sizes are those that transformers takes by default, which are of a published
model; the GPU is one of sm_90, with bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.model_runner.attention.attention_choice import AttentionChoice
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.attention.flashinfer_attention import flashinfer_lacks
from kvrelay.model_runner.attention.fp8_pages import FP8
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.checkpoint.architectures import ARCHITECTURES
from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphSizes
from kvrelay.model_runner.config.model_config import MLAConfig, ModelConfig
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.batch_invariant import check_invariant
from kvrelay.model_runner.layers.experts.expert_factory import refuse_experts
from kvrelay.model_runner.runner import graphs_lack, make_graph_room, refuse_native_options

_DTYPE: Final = torch.bfloat16
_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
_SM_90: Final = (9, 0)
_MANY_DRAFTS: Final = 512
_PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
}
"""What the default configuration of a kind lacks."""
_HEADER: Final = (
    "architecture",
    "layers",
    "FP8 KV",
    "`--batch-invariant`",
    "CUDA graphs",
    "drafts in a graph",
    "`--moe-backend`",
)


def table(kinds: dict[str, str]) -> str:
    """The modes of each architecture, by the kinds of transformers' configurations."""
    rows: list[tuple[str, ...]] = [_HEADER, ("---",) * len(_HEADER)]
    with mock.patch("torch.cuda.get_device_capability", return_value=_SM_90):
        for kind, architecture in kinds.items():
            if architecture in ARCHITECTURES:
                rows.append((f"`{architecture}`", *_modes(_published(kind, architecture))))
    rows.append(("any by transformers' code", *_modes_of_transformers_code()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _published(kind: str, architecture: str) -> ModelConfig:
    """The configuration that transformers takes by default for an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[kind](
            architectures=[architecture], **_PUBLISHED.get(kind, {})
        ).save_pretrained(folder)
        return read_config(Path(folder))


def _modes(config: ModelConfig) -> tuple[str, ...]:
    return (
        _layers(config),
        _fp8_kv(config),
        _invariant(config),
        _graphs(config),
        _drafts(config),
        _expert_backends(config),
    )


def _layers(config: ModelConfig) -> str:
    latent = isinstance(config.attention, MLAConfig)
    kinds = [
        "latents" if latent else "full" if window is None else f"window of {window}"
        for window in config.pool_windows
    ]
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    if moe is not None:
        kinds.append(f"{moe.num_experts_per_tok} of {moe.n_routed_experts} experts")
    return ", ".join(kinds)


def _geometries(config: ModelConfig, dtype: torch.dtype) -> list[KVGeometry]:
    return [
        KVGeometry(
            pool.num_layers,
            pool.num_kv_heads,
            pool.head_dim,
            dtype,
            page_size=1,
            latent=pool.latent,
            window=pool.window,
        )
        for pool in config.pool_layers
    ]


def _kernels_lack(config: ModelConfig, dtype: torch.dtype) -> str | None:
    heads = config.attention.query_heads
    lacks = (flashinfer_lacks(one, _DTYPE, heads, _GPU) for one in _geometries(config, dtype))
    return next(filter(None, lacks), None)


def _fp8_kv(config: ModelConfig) -> str:
    lack = _kernels_lack(config, FP8)
    return "yes" if lack is None else f"on GPUs in plain torch: no kernels for {lack}"


def _invariant(config: ModelConfig) -> str:
    heads = config.attention
    with _refusals() as refusals:
        check_invariant("a model", _DTYPE, _CPU)
        geometries = _geometries(config, _DTYPE)
        AttentionFactory(AttentionChoice.AUTO, geometries, _DTYPE, heads.query_heads, _CPU, True)
        for gate in _gates(config):
            refuse_experts(MoEBackend.AUTO, _DTYPE, _CPU, gate, True)
    return refusals[0] if refusals else "yes"


def _graphs(config: ModelConfig) -> str:
    lack = _kernels_lack(config, _DTYPE)
    if lack is not None:
        return f"no: no kernels for {lack}"
    schemes = [None] * any(True for _ in _gates(config))
    lack = graphs_lack(config, schemes, MoEBackend.AUTO, _DTYPE, _GPU)
    return "yes" if lack is None else f"no: {lack}"


def _drafts(config: ModelConfig) -> str:
    options = GraphOptions(GraphSizes.up_to(1), 1, most_each=_MANY_DRAFTS)
    most = make_graph_room(config, options).most_each
    return "yes" if most == _MANY_DRAFTS else f"fewer than {most}"


def _expert_backends(config: ModelConfig) -> str:
    gates = list(_gates(config))
    if not gates:
        return "none"
    has = []
    for backend, device in (
        (MoEBackend.CPU, _CPU),
        (MoEBackend.TORCH, _GPU),
        (MoEBackend.FLASHINFER, _GPU),
    ):
        with _refusals() as refusals:
            refuse_experts(backend, _DTYPE, device, gates[0], False)
        if not refusals:
            has.append(f"`{backend}`")
    return ", ".join(has)


def _gates(config: ModelConfig) -> Iterator[Any]:
    """The activation of each layer that has experts."""
    for layer in config.layers:
        if layer.moe is not None:
            yield layer.moe.clamped or config.activation


def _modes_of_transformers_code() -> tuple[str, ...]:
    answers = []
    for invariant, kv_dtype in ((False, KVDtype.FP8_E4M3), (True, KVDtype.AUTO)):
        with _refusals() as refusals:
            refuse_native_options(invariant, kv_dtype)
        answers.append("no" if refusals else "yes")
    return ("as its code has them", *answers, "no", "no", "`cpu`, `torch`")


@contextmanager
def _refusals() -> Iterator[list[str]]:
    """Collect the refusal of what is done inside, if it is refused."""
    found: list[str] = []
    try:
        yield found
    except UnsupportedOptionError as error:
        found.append(str(error))
