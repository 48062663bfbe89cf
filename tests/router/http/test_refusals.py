"""OpenAI's API over HTTP: what the router refuses, in the client's words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.chat_prompt import read_chat
from kvrelay.router.doors.http.errors import HttpError
from kvrelay.router.doors.http.fields import Fields, parse_body
from kvrelay.text.chat_template import ChatTemplate

from ..cluster import Cluster, running
from .client import CHAT, PROMPT, TEMPLATE


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [1 << 40]}, 400, "prompt"),
        ({"prompt": [402]}, 400, "prompt"),
        ({"prompt": [1, "x"]}, 400, "prompt"),
        ({"prompt": ["x"] * 257}, 400, "prompt"),
        ({"prompt": "x" * 600}, 400, "prompt"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": "x", "model": 3}, 400, "model"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "temperature": 1e300}, 400, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "x", "n": 17}, 400, "n"),
        ({"prompt": "x", "n": -1}, 400, "n"),
        ({"prompt": "x", "n": True}, 400, "n"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
        ({"prompt": "x", "stop": [1]}, 400, "stop"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, 400, "stream_options.a"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"prompt": "x", "guided_json": 3}, 400, "guided_json"),
        ({"prompt": "x", "guided_decoding_backend": "x"}, 400, "guided_decoding_backend"),
        ({"prompt": "x", "bad_words": ["y"]}, 400, "bad_words"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of"),
        ({"prompt": "x", "cache_salt": "s" * 129}, 400, "cache_salt"),
    ],
)
async def test_a_refusal_names_the_field(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_a_refused_chat(http: httpx.AsyncClient, change: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 30_000],
)
async def test_what_is_no_json_object(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body")
    assert "connection" not in answer.headers


async def test_a_body_that_is_too_large(http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 1024

    for content in (b" " * (65 << 10), pieces()):
        answer = await http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("piece", [b"[],", b"1,", b'{"a":1},', b'{"a" :1},'])
async def test_a_body_of_too_many_parts(config: RouterConfig, piece: bytes) -> None:
    large = replace(config, http_address="127.0.0.1:0", max_message_bytes=16 << 20)
    async with (
        running(large, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
    ):
        body = b'{"prompt": [' + piece * (1 << 18 if b":" in piece else 1 << 20) + b"1]}"
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 413
        assert "elements" in answer.json()["error"]["message"]


def test_a_number_of_many_digits_is_not_parsed() -> None:
    assert parse_body(b'{"a": %s}' % (b"7" * 300)) == {"a": int("7" * 300)}
    with pytest.raises(HttpError, match="digits"):
        parse_body(b'{"a": %s}' % (b"7" * 1000))
    assert int("7" * 1000)


def test_all_of_a_chat_counts_as_text() -> None:
    template = ChatTemplate(TEMPLATE, {})
    body = {"messages": [{"role": "a" * 1000, "content": "b"}]}
    texts: Any = None
    assert read_chat(Fields(body), 1040, texts, template).num_bytes == 1040


async def test_a_chat_without_a_template(config: RouterConfig) -> None:
    plain = replace(config, http_address="127.0.0.1:0")
    async with (
        running(plain, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_too_many_requests_are_told_when_to_try_again(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    cluster.decode.on_submit = None
    waiting = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
    await cluster.prefill.submitted()
    answer = await http.post("/v1/completions", json={"prompt": [[1]] * 8, "max_tokens": 1})
    waiting.cancel()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["retry-after-ms"] == "500"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
        ({"max_completion_tokens": 10**8}, "max_completion_tokens"),
        ({"max_tokens": 10**8}, "max_tokens"),
    ],
)
async def test_a_refused_chat_parameter_has_the_clients_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": CHAT["messages"], **fields}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["param"], error["message"].split(":")[0]) == (param, param)


async def test_more_prompts_than_may_be_live_are_never_begun(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [[1]] * 9, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert not cluster.prefill.submits
    assert await cluster.metric('kvrelay_requests_total{model="counter",outcome="invalid"}') == 1
    assert await cluster.metric('kvrelay_door_requests_total{door="http"') == 1


def test_each_field_is_taken_once() -> None:
    fields = Fields({"a": 1, "b": None})
    assert fields.integer("a", 0, 2) == 1
    assert fields.text("b") is None
    fields.finish()
