"""/v1/responses by OpenAI's client: streamed as whole, with tools, reasoning, forms, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from kvrelay.router.config import ReasoningFormat, RouterConfig
from kvrelay.v1 import worker_pb2

from ..cluster import Cluster, running
from ..scripted_worker import RETRACTED, ScriptedWorker, count_aggregated, say_counted
from .test_tools import ARGUMENTS, CALLS, LENGTH, saying, served

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
TIME: Any = {"type": "function", "name": "time", "parameters": None, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch"}
TOOLS = [WEATHER, TIME, PATCH, {"type": "web_search"}]
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
THOUGHT = f"<think>\nHm.\n</think>\n\n{CALLS}\n{PATCHED}"
EXPECTED: Any = [
    ("reasoning", "Hm."),
    ("message", "I look."),
    ("weather", ARGUMENTS),
    ("time", "{}"),
    ("patch", "a\nb"),
]


def told(response: Any) -> list[tuple[str, str]]:
    """What the items of a response say."""
    said = []
    for item in response.output:
        if item.type in ("message", "reasoning"):
            [part] = item.content
            said.append((item.type, part.text))
        else:
            said.append((item.name, item.input if item.type[0] == "c" else item.arguments))
    return said


async def streamed(client: openai.AsyncOpenAI, **members: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the response that its last one has; deltas make the items."""
    events = [event async for event in await client.responses.create(stream=True, **members)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[0].response.id == last.id
    grown: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.output_index] = grown.get(event.output_index, "") + event.delta
    assert [grown.get(n, "") for n in range(len(last.output))] == [text for _, text in told(last)]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    if last.status != "failed":
        assert [one.to_dict() for one in done] == [one.to_dict() for one in last.output]
    return events, last


async def test_items_streamed_and_whole(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    changes = {"reasoning_parser": ReasoningFormat.THINK}
    async with served(config, tmp_path, **changes) as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying(THOUGHT, tokenizer)
        asked: Any = {"input": "hi", "tools": TOOLS, "model": "", "metadata": {"a": "b"}}
        whole = await client.responses.create(**asked)
        events, last = await streamed(client, **asked)
        for one in (whole, last):
            assert told(one) == EXPECTED
            assert (one.status, one.object, one.error) == ("completed", "response", None)
            assert (one.metadata, one.store) == ({"a": "b"}, False)
            assert [tool.type for tool in one.tools] == ["function", "function", "custom"]
            assert one.usage.total_tokens == one.usage.input_tokens + one.usage.output_tokens
            assert 0 < one.usage.output_tokens_details.reasoning_tokens < one.usage.output_tokens
            assert [item.call_id[:5] for item in one.output[2:]] == ["call_"] * 3
        assert whole.usage == last.usage
        assert whole.output_text == "I look."
        assert events[-1].type == "response.completed"
        left_out = await cluster.metric("kvrelay_http_left_out_total")
        assert left_out == 2, "the search, of each call"


async def test_the_next_turn_of_an_agent(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}|"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    changes = {"reasoning_parser": ReasoningFormat.THINK}
    async with served(config, tmp_path, template, **changes) as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying("<think>\nHm.\n</think>\n\nYes.", tokenizer)
        first = await client.responses.create(input="hi", model="")
        items: Any = [{"role": "user", "content": "hi"}, *first.output]
        call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
        items += [call, {"type": "function_call_output", "call_id": "c", "output": "seen"}]
        await client.responses.create(input=items, instructions="Be.", model="")
        prompt = tokenizer.decode(list(worker.submits[-1].input_ids))
        expected = '<system>|Be.|<user>|hi|<assistant>Hm.|Yes.|f{"a": 1}<tool>|seen|'
        assert prompt == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_is_cut(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        text = 'I look.\n<tool_call>\n{"name": "wea'
        cluster.workers[0].on_submit = saying(text, tokenizer, LENGTH)
        asked: Any = {"input": "hi", "max_output_tokens": 3, "model": "", "tools": TOOLS}
        if stream:
            events, response = await streamed(client, **asked)
            assert events[-1].type == "response.incomplete"
        else:
            response = await client.responses.create(**asked)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.max_output_tokens == 3
        [message] = response.output
        assert (message.status, told(response)) == ("incomplete", [("message", "I look.")])
        sent = cluster.workers[0].submits[0].sampling_params
        assert sent.max_tokens == 3


async def test_text_in_a_form(config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    async with served(config, tmp_path) as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying('{"a": 1}', tokenizer)
        response = await client.responses.create(input="hi", text=form, model="")
        assert response.output_text == '{"a": 1}'
        wanted = worker.submits[-1].sampling_params.structured_output
        assert json.loads(wanted.json_schema) == schema
        await client.responses.create(
            input="hi", text={"format": {"type": "json_object"}}, model=""
        )
        assert worker.submits[-1].sampling_params.HasField("structured_output")
        bad = {"properties": {"b": {"type": "array", "uniqueItems": True}}}
        form["format"]["schema"] = bad
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema: .*uniqueItems"):
            await client.responses.create(input="hi", text=form, model="")


async def test_what_needs_a_memory_is_refused(shared_http: httpx.AsyncClient) -> None:
    stored: list[tuple[dict[str, Any], str]] = [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].item_reference"),
    ]
    for members, place in stored:
        answer = await shared_http.post("/v1/responses", json={"input": "hi", **members})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (place, "invalid_request_error")
    others: list[tuple[dict[str, Any], str, str | None]] = [
        ({"model": "other"}, "model", "model_not_found"),
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
    ]
    for members, place, code in others:
        answer = await shared_http.post("/v1/responses", json={"input": "hi", **members})
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (place, code), error
    assert (await shared_http.get("/v1/responses/resp_x")).status_code == 404


async def test_a_body_that_is_nested_deeply(shared_http: httpx.AsyncClient) -> None:
    """It is echoed, or refused as what it is."""
    for depth in (100, 400, 900, 5000):
        deep = "[" * depth + "]" * depth
        for members in (f'"metadata": {{"a": {deep}}}', f'"text": {{"format": {{"a": {deep}}}}}'):
            body = f'{{"input": "hi", "max_output_tokens": 2, {members}}}'
            answer = await shared_http.post("/v1/responses", content=body)
            assert answer.status_code in (200, 400), (depth, answer.text)


async def two_tokens(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    for position in range(2):
        say_counted(worker, submit, position)


async def test_a_worker_that_is_lost_in_mid_stream(http_config: RouterConfig) -> None:
    """The stream goes on, with no token twice."""
    async with responding(http_config, "aggregated-0", "aggregated-1") as (cluster, client):
        asked: Any = {"input": "hi", "model": "", "max_output_tokens": 8}
        cluster.count()
        _, undisturbed = await streamed(client, **asked)
        first = True

        async def retract_once(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
            nonlocal first
            if first:
                first = False
                await two_tokens(worker, submit)
                worker.say(submit, 2, end=RETRACTED)
            else:
                await count_aggregated(worker, submit)

        for worker in cluster.workers:
            worker.on_submit = retract_once
        _, response = await streamed(client, **asked)
        assert told(response) == told(undisturbed)
        assert len({submit.attempt for worker in cluster.workers for submit in worker.submits}) > 1


async def test_a_failure_in_mid_stream(http_config: RouterConfig) -> None:
    """The response fails, with the items until then."""
    async with responding(http_config, "aggregated-0") as (cluster, client):
        cluster.workers[0].on_submit = two_tokens
        events: list[Any] = []
        async for event in await client.responses.create(input="hi", model="", stream=True):
            if event.type == "response.output_text.delta" and len(events) < 6:
                await cluster.router.stop()
            events.append(event)
        failed = events[-1]
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error.code == "server_error"
        assert failed.response.error.message == "the router is stopping"


async def test_a_failure_after_silence(http_config: RouterConfig) -> None:
    """The headers are out, so it is an event: the first, after the response's beginning."""
    config = replace(http_config, sse_keepalive=0.05)
    async with responding(config, "aggregated-0") as (cluster, client), httpx.AsyncClient() as http:
        url, body = f"{client.base_url}responses", {"input": "hi", "stream": True}
        async with http.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            await cluster.router.stop()
            kinds = [line[7:] async for line in lines if line.startswith("event: ")]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


async def test_a_client_that_leaves_ends_its_request(http_config: RouterConfig) -> None:
    async with responding(http_config, "aggregated-0") as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = two_tokens
        stream = await client.responses.create(input="hi", model="", stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(30):
            while not worker.cancels:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def responding(
    config: RouterConfig, *workers: str
) -> AsyncIterator[tuple[Cluster, openai.AsyncOpenAI]]:
    async with running(replace(config, default_max_tokens=300), *workers) as cluster:
        base = f"http://{cluster.router.http_address}/v1"
        async with openai.AsyncOpenAI(
            base_url=base, api_key="x", max_retries=0, timeout=60
        ) as client:
            yield cluster, client


async def test_the_client_that_waits(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """OpenAI's other client, with its own collector of events."""
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)

        def ask() -> Any:
            with openai.OpenAI(base_url=str(client.base_url), api_key="x", timeout=60) as waiting:
                whole = waiting.responses.create(input="hi", model="", tools=TOOLS)
                with waiting.responses.stream(input="hi", model="", tools=TOOLS) as stream:
                    stream.until_done()
                    return whole, stream.get_final_response()

        whole, collected = await asyncio.to_thread(ask)
        assert told(whole) == told(collected) == EXPECTED[1:4]
