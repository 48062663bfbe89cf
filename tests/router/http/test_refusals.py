"""OpenAI's API over HTTP: what the router refuses, in the client's words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.doors.http.chat_prompt import read_chat
from kvrelay.router.doors.http.errors import HttpError
from kvrelay.router.doors.http.json_body import parse_body, read_body
from kvrelay.router.doors.http.protocol import ChatCompletionRequest, CompletionRequest
from kvrelay.router.errors import InvalidField
from kvrelay.router.router import Router
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.v1 import inference_pb2
from kvrelay.wire.sampling_limits import LIMITS

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
        ({"prompt": "x", "n": 129}, 400, "n"),
        ({"prompt": "x", "n": -1}, 400, "n"),
        ({"prompt": "x", "n": True}, 400, "n"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "x", "stop": [1]}, 400, "stop"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, 400, "logit_bias"),
        ({"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, 400, "stream_options.a"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"prompt": "x", "guided_json": 3}, 400, "guided_json"),
        ({"prompt": "x", "guided_json": {"a": {}}, "guided_regex": 3}, 400, "guided_regex"),
        ({"prompt": "x", "bad_words": [""]}, 400, "bad_words"),
        ({"prompt": "x", "length_penalty": True}, 400, "length_penalty"),
        ({"prompt": "x", "spaces_between_special_tokens": 1}, 400, "spaces_between_special_tokens"),
        ({"prompt": "x", "idle_timeout_seconds": 1}, 400, "idle_timeout_seconds"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": "x", "seed": 10**300}, 400, "seed"),
        ({"prompt": "x", "temperature": 10**400}, 400, "temperature"),
        ({"prompt": "x", "top_k": "5"}, 400, "top_k"),
        ({"prompt": "x", "stream": "true"}, 400, "stream"),
        ({"prompt": "x", "stream": 1}, 400, "stream"),
        ({"prompt": "x", "logit_bias": {"0" * 20 + "9" * 20: 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": "x"}}, 400, "logit_bias.1"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of"),
        ({"prompt": "x", "cache_salt": "s" * 129}, 400, "cache_salt"),
    ],
)
async def test_a_refusal_names_the_field(
    shared_http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await shared_http.post("/v1/completions", json=body)
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
        ({"messages": [{"role": "a", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
        ({"messages": None}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "bogus"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_a_refused_chat(
    shared_http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    answer = await shared_http.post("/v1/chat/completions", json={**CHAT, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 30_000],
)
async def test_what_is_no_json_object(shared_http: httpx.AsyncClient, body: bytes) -> None:
    answer = await shared_http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body")
    assert "connection" not in answer.headers


async def test_a_body_that_is_too_large(shared_http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 1024

    for content in (b" " * (65 << 10), pieces()):
        answer = await shared_http.post("/v1/completions", content=content)
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"n": "2"}, 'n: must be a whole number, got "2"'),
        ({"n": -1}, "n: must be at least 0, got -1"),
        ({"seed": 1 << 64}, f"seed: must be at most {(1 << 64) - 1}, got {1 << 64}"),
        ({"echo": 1}, "echo: must be true or false, got 1"),
        ({"model": ["x"]}, "model: must be a string, got a list"),
        ({"top_p": True}, "top_p: must be a number, got true"),
        ({"idle": "x" * 99}, "idle: is no field that this server knows"),
        ({"stop": 1}, "stop: must be a string, or a list of strings"),
        ({"use_beam_search": True}, "use_beam_search: is not served, but for false"),
        ({"logit_bias": {"cat": 1}}, 'logit_bias: must have token ids as its names, got "cat"'),
        ({"cache_salt": ""}, "cache_salt: must have at least 1 character"),
        ({"stream_options": []}, "stream_options: must be an object, got a list"),
        ({"guided_json": 3}, "guided_json: must be a JSON schema"),
        ({"prompt": [-1]}, f"prompt: token ids must be in [0, {(1 << 32) - 1}]"),
    ],
)
def test_a_refusal_says_what_is_expected(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_body(CompletionRequest, {**PROMPT, **change})
    assert str(refused.value) == problem


def test_null_stands_for_an_absent_member() -> None:
    absent = read_body(CompletionRequest, {"prompt": "x"})
    names = [*CompletionRequest.model_fields, "no_such_member"]
    given = read_body(CompletionRequest, {**dict.fromkeys(names), "prompt": "x"})
    assert {name: getattr(given, name) for name in CompletionRequest.model_fields} == dict(absent)
    assert given.sampling_params() == absent.sampling_params() == inference_pb2.SamplingParams()


def test_each_parameter_that_has_legal_values_is_a_member() -> None:
    assert set(LIMITS) <= set(CompletionRequest.model_fields)
    assert set(LIMITS) <= set(ChatCompletionRequest.model_fields)


def test_a_template_sees_messages_and_tools_as_they_were_sent() -> None:
    """With all members in their order, but for contents and arguments, which it gets whole."""
    function = {"description": "d", "name": "f", "parameters": {"b": 1, "a": None}, "x": None}
    tool = {"function": function, "type": "function", "strict": True}
    call = {"function": {"arguments": '{"b": 1}', "name": "f"}, "id": "x"}
    message = {"name": "n", "tool_calls": [call], "role": "assistant", "content": ["a", "b"]}
    sent = {"messages": [message, {"role": "user"}], "tools": [tool]}
    read = read_body(ChatCompletionRequest, sent)
    whole = {**call, "function": {"arguments": {"b": 1}, "name": "f"}}
    seen = [{**message, "tool_calls": [whole], "content": "a\nb"}, {"role": "user", "content": ""}]
    assert json.dumps(read.messages) == json.dumps(seen)
    assert json.dumps(read.tools) == json.dumps(sent["tools"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"messages": [3] * 10_000}, "messages[0]: must be an object"),
        ({"messages": [{"role": 3}] * 10_000}, "messages[0].role: must be a string"),
        ({"messages": [{"role": "a", "content": [3] * 10_000}]}, "messages[0].content[0]: must be"),
        ({"messages": [{"role": "a", "tool_calls": [3] * 10_000}]}, "messages[0].tool_calls[0]: "),
        ({"tools": [3] * 128}, "tools[0]: must be an object"),
        ({"stop": [3] * 10_000}, "stop: must be"),
        ({"logit_bias": {str(number): "x" for number in range(10_000)}}, "logit_bias.0: must be"),
        ({f"member{number}": 1 for number in range(10_000)}, "body: has more than 1024 faults"),
    ],
)
def test_the_first_of_many_faults(change: dict[str, Any], problem: str) -> None:
    """Reading ends at the first, or where there are too many to list."""
    with pytest.raises((HttpError, InvalidField)) as refused:
        read_body(ChatCompletionRequest, {**CHAT, **change})
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize("depth", [300, 600, 900])
async def test_a_schema_of_many_levels(shared_http: httpx.AsyncClient, depth: int) -> None:
    schema = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"prompt": "x", "guided_json": {schema}}}'
    answer = await shared_http.post("/v1/completions", content=body.encode())
    assert answer.status_code == 400


def test_all_of_a_chat_counts_as_text() -> None:
    template = ChatTemplate(TEMPLATE, {})
    body = {"messages": [{"role": "a" * 1000, "content": "b"}]}
    texts: Any = None
    chat = read_body(ChatCompletionRequest, body)
    assert read_chat(chat, 1040, texts, template).num_bytes == 1040


async def test_a_chat_without_a_template(config: RouterConfig) -> None:
    plain = replace(config, http_address="127.0.0.1:0")
    async with (
        running(plain, "prefill-0", "decode-0") as cluster,
        httpx.AsyncClient(base_url=f"http://{cluster.router.http_address}") as http,
    ):
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_a_body_for_the_tokenizer_is_read_before_workers_are_missed(
    http_config: RouterConfig,
) -> None:
    router = Router(http_config, StaticDiscovery([]))
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as http:
            for body in ({"prompt": 3}, {"messages": [3]}):
                assert (await http.post("/tokenize", json=body)).status_code == 400
            other = {"prompt": "x", "model": "no-such-model"}
            assert (await http.post("/tokenize", json=other)).status_code == 404
            assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 503
    finally:
        await router.stop()


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
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_refused_chat_parameter_has_the_clients_name(
    shared_http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": CHAT["messages"], **fields}
    error = (await shared_http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["param"], error["message"].split(":")[0]) == (param, param)


async def test_more_prompts_than_may_be_live_are_never_begun(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [[1]] * 9, "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert not cluster.prefill.submits
    assert await cluster.metric('kvrelay_requests_total{model="counter",outcome="invalid"}') == 1
    assert await cluster.metric('kvrelay_door_requests_total{door="http"') == 1
