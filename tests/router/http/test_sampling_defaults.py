"""The sampling parameters of a model's generation_config.json, where a request says nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from kvrelay.router.admission.max_tokens import OutputLimit, max_tokens_of
from kvrelay.router.admission.sampling_defaults import (
    NO_DEFAULTS,
    SamplingDefaults,
    load_sampling_defaults,
)
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import InvalidField, StartError
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb

from ..cluster import Cluster, collect
from .client import CHAT, counting

LIMITS = RequestLimits(
    vocab_size=100, max_model_len=64, prefill_pool_tokens=80, decode_pool_tokens=80
)
GIVEN = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": None,
    "repetition_penalty": 1.5,
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": [1],
}
TOLD = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "repetition_penalty": 1.5,
    "max_tokens": 6,
}


def write(folder: Path, described: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(described))
    return folder


def sent(cluster: Cluster) -> Any:
    """The parameters of the latest request, as its decode worker has them."""
    return cluster.decode.submits[-1].sampling_params


async def test_defaults_hold_at_both_doors(http_config: RouterConfig, tmp_path: Path) -> None:
    shutil.copy(http_config.model_path / "tokenizer.json", tmp_path)
    config = replace(http_config, model_path=write(tmp_path, GIVEN), default_max_tokens=None)
    async with counting(config) as (cluster, http):
        chat = {**CHAT, "max_tokens": 50, "top_p": 0.25, "top_k": -1}
        answer = (await http.post("/v1/chat/completions", json=chat, timeout=60)).json()
        assert answer["usage"]["completion_tokens"] == 6
        asked = sent(cluster)
        assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.25, 0)
        assert (asked.repetition_penalty, asked.min_p, asked.max_tokens) == (1.5, 0.0, 6)

        await collect(cluster.generate(max_tokens=None))
        asked = sent(cluster)
        assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.5, 0.75, 20, 6)

        [model] = (await http.get("/v1/models")).json()["data"]
        assert model["default_sampling_params"] == TOLD
        info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest())
        told = MessageToDict(info.default_sampling_params, preserving_proto_field_name=True)
        assert told == TOLD


def test_where_the_file_is(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", GIVEN), write(tmp_path / "other", {"top_k": -1})
    assert load_sampling_defaults(model, "auto").members() == TOLD
    assert load_sampling_defaults(model, "none") is NO_DEFAULTS
    assert load_sampling_defaults(model, str(other)) == SamplingDefaults({"top_k": 0})
    assert load_sampling_defaults(tmp_path, "auto") is NO_DEFAULTS
    with pytest.raises(ValueError, match="cannot be read"):
        load_sampling_defaults(model, str(tmp_path))


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ([], "must be a JSON object"),
        ({"temperature": "1"}, "temperature: must be a number"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"top_p": 0}, "top_p: must be in"),
        ({"top_k": 1.5}, "top_k: must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer of at least 1"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, described: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_sampling_defaults(write(tmp_path, described), "auto")


async def test_a_router_does_not_start_with_a_bad_file(
    config: RouterConfig, tmp_path: Path
) -> None:
    shutil.copy(config.model_path / "tokenizer.json", tmp_path)
    bad = replace(config, model_path=write(tmp_path, {"top_p": 2}))
    with pytest.raises(StartError, match=r"--generation-config.*top_p.*none leaves it out"):
        await Router(bad, StaticDiscovery()).start()


@pytest.mark.parametrize(
    ("limit", "asked", "default", "most"),
    [
        (OutputLimit.CUT, None, None, (9, False)),
        (OutputLimit.CUT, 99, None, (9, False)),
        (OutputLimit.CUT, None, 5, (5, False)),
        (OutputLimit.OPEN, None, None, (9, True)),
        (OutputLimit.STRICT, None, None, (9, False)),
        (OutputLimit.STRICT, 9, None, (9, False)),
    ],
)
def test_the_models_bound_of_outputs(
    limit: OutputLimit, asked: int | None, default: int | None, most: tuple[int, bool]
) -> None:
    params = pb.SamplingParams(max_tokens=asked)
    assert max_tokens_of(params, 40, LIMITS, limit, default, 9) == most


def test_a_strict_door_refuses_more_than_the_models_bound() -> None:
    with pytest.raises(InvalidField, match="must be at most 9"):
        max_tokens_of(pb.SamplingParams(max_tokens=10), 40, LIMITS, OutputLimit.STRICT, None, 9)
