"""Reports of other servers' users, tried here: what came out right stays right.

Each test names the report that it was made from.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from kvrelay.router.doors.http.chat_prompt import read_chat
from kvrelay.router.doors.http.json_body import read_body
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.text.chat_template import ChatTemplate

from ..cluster import Cluster
from .client import CHAT, PROMPT, connection, events, text_of
from .test_http_protocol import answer

BODY = json.dumps(PROMPT).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


async def test_the_role_comes_once_a_choice_in_its_first_chunk(http: httpx.AsyncClient) -> None:
    """tensorzero#1265, MiniMax-M2.5#2."""
    streamed = await http.post("/v1/chat/completions", json={**CHAT, "n": 2, "stream": True})
    of_choice: dict[int, list[dict[str, Any]]] = {}
    for chunk in events(streamed.text):
        for choice in chunk["choices"]:
            of_choice.setdefault(choice["index"], []).append(choice["delta"])
    assert sorted(of_choice) == [0, 1]
    for deltas in of_choice.values():
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_a_turn_of_calls_without_content_is_told_without_a_none(content: Any) -> None:
    """cubist38/mlx-openai-server#205, co-l/openfox#117."""
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
    if content != "absent":
        turn["content"] = content
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}",
        {},
    )
    texts: Any = None
    body = read_body(ChatCompletionRequest, {"messages": [turn]})
    chat = read_chat(body, 100, texts, template)
    assert chat._template.render(chat._messages, **chat._options) == "<assistant>[f]"


async def test_calls_alike_draw_different_seeds(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """mlx-vlm#1818, Whallm#8: eight at once, with one x-request-id."""
    headers = {"x-request-id": "same"}
    calls = [http.post("/v1/completions", json=PROMPT, headers=headers) for _ in range(8)]
    answers = await asyncio.gather(*calls)
    assert [one.status_code for one in answers] == [200] * 8
    assert {one.headers["x-request-id"] for one in answers} == {"same"}
    assert len({submit.sampling_params.seed for submit in cluster.prefill.submits}) == 8
    assert len({one.json()["id"] for one in answers}) == 8


async def test_bodies_as_clients_frame_them(cluster: Cluster) -> None:
    """llama.cpp#20269, lua-http#239: chunks, Expect, pipelining, no content-type."""
    chunks = b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
    length = b"content-length: %d\r\n" % len(BODY)
    async with connection(cluster) as (reader, writer):
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert (await answer(reader))[0] == 200
        writer.write((POST + length + b"\r\n" + BODY) * 3)
        assert [(await answer(reader))[0] for _ in range(3)] == [200] * 3
        writer.write(POST + length + b"expect: 100-continue\r\n\r\n")
        assert (await answer(reader))[0] == 100
        writer.write(BODY)
        assert (await answer(reader))[0] == 200
        writer.write(POST + length + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert (await answer(reader))[0] == 400, "two lengths are how calls are smuggled"


async def test_unknown_paths_and_models_make_no_series(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    """sgl-project/sglang#31193, litellm#35666."""

    async def series() -> set[str]:
        lines = (await http.get("/metrics")).text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    async def ask(number: int) -> None:
        assert (await http.get(f"/v1/{number}")).status_code == 404
        assert (await http.get(f"/v1/models/{number}")).status_code == 404
        other = await http.post("/v1/completions", json={**PROMPT, "model": f"m{number}"})
        assert other.status_code == 404

    await series()
    await ask(0)
    before = await series()
    for number in range(1, 20):
        await ask(number)
    assert await series() == before


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_with_choices_are_echoed_and_counted(
    http: httpx.AsyncClient, tokenizer: Tokenizer, stream: bool
) -> None:
    """llama.cpp#17935, openai-python#90: three prompts, n 2."""
    prompts = [[1, 2], [10], [20, 21, 22]]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 3, "echo": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    told = (await http.post("/v1/completions", json=body)).raise_for_status()
    chunks = events(told.text) if stream else [told.json()]
    texts = [""] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    for index, text in enumerate(texts):
        assert text.startswith(text_of(tokenizer, prompts[index // 2]))
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 18)


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"logprobs": 21}]
)
async def test_more_log_probabilities_than_are_served_cost_no_work(
    cluster: Cluster, http: httpx.AsyncClient, fields: dict[str, int]
) -> None:
    """local-inference-lab/vllm#264, #266."""
    refused = await http.post("/v1/completions", json={**PROMPT, **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
    assert not cluster.prefill.submits


async def test_a_refusal_of_one_body_leaves_the_next_alone(http: httpx.AsyncClient) -> None:
    """gonka#1170, vllm-project/vllm#51795, JustVugg/colibri#1589: odd bodies and odd JSON."""
    for content in (b'{"prompt":"\\udc80"}', b"\xff\xfe{", b'{"prompt":1e999}', b"nul", b'{"a":'):
        refused = await http.post("/v1/completions", content=content)
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
    assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
