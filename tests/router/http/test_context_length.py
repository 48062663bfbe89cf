"""OpenAI's API over HTTP: prompts and outputs that are longer than the context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.router.config import RouterConfig

from ..cluster import Cluster, running
from .client import CHAT, counting, events

LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [1] * 512}, "prompt"),
    ("/v1/completions", {"prompt": "x" * 600}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), LONG)
async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    """litellm, langchain, inspect and others shorten a conversation by code or by words."""
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        param,
    )
    assert "This model's maximum context length is 512 tokens" in error["message"]
    assert "--max-model-len" in error["message"]


async def test_workers_that_hold_less_than_the_model_takes(http_config: RouterConfig) -> None:
    async with running(http_config, "prefill-0", "decode-0") as cluster:
        cluster.count()
        small = [replace(worker.endpoint, pool_tokens=200) for worker in cluster.workers]
        cluster.discovery.replace(small)
        async with httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http:
            body = {"prompt": [1] * 200}
            error = (await http.post("/v1/completions", json=body)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 200 tokens" in error["message"]
            assert "--kv-memory" in error["message"]
            [model] = (await http.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == 200
            tokenized = (await http.post("/tokenize", json={"prompt": "x"})).json()
            assert tokenized["max_model_len"] == 200


@pytest.mark.parametrize(
    "limit", [{"max_tokens": 10**8}, {"max_completion_tokens": 512}, {"max_tokens": 500}]
)
async def test_more_output_than_there_is_room_for_ends_by_length(
    http: httpx.AsyncClient, limit: dict[str, int]
) -> None:
    body = {"messages": CHAT["messages"], **limit}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


async def test_a_chat_without_a_limit_has_what_is_left(http_config: RouterConfig) -> None:
    config = replace(http_config, default_max_tokens=None)
    messages = {"messages": CHAT["messages"]}
    async with counting(config) as (cluster, http):
        answer = (await http.post("/v1/chat/completions", json=messages)).json()
        assert answer["usage"]["total_tokens"] == 512
        submit = cluster.decode.submits[-1]
        assert submit.open_ended
        assert submit.sampling_params.max_tokens == answer["usage"]["completion_tokens"]
        completion = (await http.post("/v1/completions", json={"prompt": [1, 2]})).json()
        assert completion["usage"]["completion_tokens"] == 256
        assert not cluster.decode.submits[-1].open_ended
    async with counting(http_config) as (_, http):
        answer = (await http.post("/v1/chat/completions", json=messages)).json()
        assert answer["usage"]["completion_tokens"] == http_config.default_max_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_the_whole_context_is_echoed(
    cluster: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": [7] * 512, "max_tokens": 0, "echo": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status()
    chunks = events(answer.text) if stream else [answer.json()]
    assert {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}
    [reason] = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert reason == "length"
    refused = await http.post("/v1/completions", json={**body, "prompt": [7] * 513})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
