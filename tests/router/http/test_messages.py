"""Anthropic's API over HTTP, by its own client: whole answers, streams, tools and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.http.json_body import read_body
from kvrelay.router.doors.http.messages.message_bodies import MessagesRequest
from kvrelay.router.doors.http.messages.message_chat import chat_members
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.router.errors import InvalidField
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2

from ..cluster import Cluster, running
from ..scripted_worker import RETRACTED, ScriptedWorker, emitted_by, until
from .client import counting, with_http
from .test_fuzz import JSON
from .test_tools import EOS, LENGTH, saying

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call>, and <think> #}'
    "{{ enable_thinking }}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
ASKED: Any = {
    "model": "opus",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hi."}],
}
WEATHER: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME: Any = {"type": "custom", "name": "time", "input_schema": {"type": "object"}}
TOKENS = """
[[token]]
name = "alice"
token = "a"
max_live_requests = 1
[[token]]
name = "operator"
token = "o"
rights = ["admin"]
"""
THINKS: Any = {"type": "enabled", "budget_tokens": 1024}
ANSWER = (
    "<think>\nHm, hm.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Köln \\"am\\" Rhein"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
BLOCKS: Any = [
    {"type": "thinking", "thinking": "Hm, hm.", "signature": "unsigned"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": 'Köln "am" Rhein'}},
    {"type": "tool_use", "name": "time", "input": {}},
]


@asynccontextmanager
async def served(
    config: RouterConfig, folder: Path, **changes: Any
) -> AsyncIterator[tuple[Cluster, anthropic.AsyncAnthropic]]:
    config = with_http(config, folder, model_aliases=("opus",), **changes)
    assert config.chat_template is not None
    config.chat_template.write_text(TEMPLATE)
    async with running(config, "aggregated-0") as cluster:
        base = f"http://{cluster.router.http_address}"
        async with anthropic.AsyncAnthropic(
            base_url=base, api_key="x", max_retries=0, timeout=60
        ) as client:
            yield cluster, client


def blocks_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The content without the ids of calls, which differ each time."""
    blocks = [block.model_dump(exclude_unset=True) for block in message.content]
    for block in blocks:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return blocks


async def streamed(client: anthropic.AsyncAnthropic, **asked: Any) -> anthropic.types.Message:
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


async def test_thinking_text_and_calls_streamed_and_whole(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        [worker] = cluster.workers
        worker.on_submit = saying(ANSWER, tokenizer)
        asked = {**ASKED, "tools": [WEATHER, TIME], "thinking": THINKS}
        whole, stream = await client.messages.create(**asked), await streamed(client, **asked)
        for message in (whole, stream):
            assert blocks_of(message) == BLOCKS
            told = (message.model, message.role, message.stop_reason, message.stop_sequence)
            assert told == ("opus", "assistant", "tool_use", None)
            assert message.id.startswith("msg_")
            usage = message.usage
            assert usage.input_tokens == len(worker.submits[0].input_ids)
            assert usage.output_tokens == len(tokenizer.encode(ANSWER).ids) + 1
            assert usage.output_tokens_details is not None
            assert usage.output_tokens_details.thinking_tokens > 2
        prompt = tokenizer.decode(list(worker.submits[0].input_ids))
        assert '"name": "weather"' in prompt
        assert "True<user>Hi." in prompt
        # Nobody who does not ask for thinking is shown any.
        for message in (await client.messages.create(**ASKED), await streamed(client, **ASKED)):
            assert [block.type for block in message.content] == ["text"]
        assert "False<user>" in tokenizer.decode(list(worker.submits[-1].input_ids))

        def from_a_thread() -> list[str]:
            base = f"http://{cluster.router.http_address}"
            with (
                anthropic.Anthropic(base_url=base, auth_token="x", timeout=60) as blocking,
                blocking.beta.messages.stream(**asked) as events,
            ):
                return [event.type for event in events]

        names = await asyncio.to_thread(from_a_thread)
        assert [names[0], *names[-2:]] == ["message_start", "message_delta", "message_stop"]
        assert names.count("content_block_start") == names.count("content_block_stop") == 4
        assert {"signature", "thinking", "input_json", "text"} <= set(names)


async def test_a_message_is_the_same_if_it_is_computed_in_two_attempts(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    async with served(config, tmp_path) as (cluster, client):
        [worker] = cluster.workers
        asked = {**ASKED, "tools": [WEATHER, TIME], "thinking": THINKS, "max_tokens": 200}
        for cut in (3, len(ids) // 2, len(ids) - 3):

            async def say(
                worker: ScriptedWorker, submit: worker_pb2.SubmitRequest, cut: int = cut
            ) -> None:
                first = len(emitted_by(submit))
                worker.say(submit, first, tuple(ids[first : None if first else cut]))
                if first:
                    ended = worker_pb2.RequestEnd(reason="REASON_STOP", matched_token_id=EOS)
                    worker.say(submit, len(ids), (EOS,), end=ended)
                else:
                    worker.say(submit, cut, end=RETRACTED)

            worker.on_submit = say
            before = len(worker.submits)
            async with client.messages.stream(**asked) as stream:
                names = [event.type async for event in stream]
                assert blocks_of(await stream.get_final_message()) == BLOCKS
            assert names.count("message_start") == names.count("message_stop") == 1
            assert len(worker.submits) == before + 2


async def test_why_a_message_ends(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "K'
    stopped = worker_pb2.RequestEnd(
        reason=worker_pb2.RequestEnd.REASON_STOP, matched_stop_string="END"
    )
    async with served(config, tmp_path) as (cluster, client):
        [worker] = cluster.workers
        for text, end, most, reason in [
            ("Yes.", None, 100, "end_turn"),
            ("Yes.", stopped, 100, "stop_sequence"),
            ("Yes.", LENGTH, len(tokenizer.encode("Yes.").ids), "max_tokens"),
            ("Yes.", LENGTH, 100, "model_context_window_exceeded"),
            (cut, LENGTH, len(tokenizer.encode(cut).ids), "max_tokens"),
            ("", None, 100, "end_turn"),
            ("Yes.", None, 0, "max_tokens"),
        ]:
            worker.on_submit = saying(text, tokenizer, end)
            asked = {**ASKED, "max_tokens": most, "stop_sequences": ["END"], "tools": [WEATHER]}
            whole, stream = await client.messages.create(**asked), await streamed(client, **asked)
            assert whole.stop_reason == stream.stop_reason == reason
            sequence = "END" if end is stopped else None
            assert whole.stop_sequence == stream.stop_sequence == sequence
            shown = [{"type": "text", "text": text}] if text == "Yes." and most else []
            if text != cut:
                assert blocks_of(whole) == blocks_of(stream) == shown
            assert (whole.usage.output_tokens > 0) is (most > 0)
            assert worker.submits[-1].sampling_params.stop == ["END"]


async def test_what_has_no_meaning_is_left_out(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying("Yes.", tokenizer)
        search = {"type": "web_search_20250305", "name": "web_search"}
        hint = {"type": "ephemeral"}
        asked = {
            **ASKED,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "Be short.", "cache_control": hint},
            ],
            "tools": [search],
            "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "x"},
            "extra_body": {"context_management": {"edits": []}, "container": None},
        }
        for _ in range(2):
            assert (await client.messages.create(**asked)).stop_reason == "end_turn"
        prompt = tokenizer.decode(list(cluster.workers[0].submits[-1].input_ids))
        assert prompt == "False<system>Be short.<user>Hi."
        for what in ("fields.context_management", f"tools.{search['type']}", "system.billing"):
            logged = [one for one in caplog.messages if what in one]
            assert len(logged) == 1, what
        line = 'kvrelay_http_left_out_total{model="counter",path="/v1/messages",what="fields.'
        assert await cluster.metric(line + 'context_management"}') == 2


@pytest.mark.parametrize(
    ("of_system", "of_turn", "seconds"),
    [(None, None, 0), ({"type": "ephemeral"}, None, 300), ({}, {"ttl": "1h"}, 3600)],
)
async def test_marks_for_the_cache_say_how_long_it_is_retained(
    http_config: RouterConfig,
    of_system: dict[str, str] | None,
    of_turn: dict[str, str] | None,
    seconds: float,
) -> None:
    """The longest counts, wherever it is."""
    said = []
    for text, mark in (("Be short.", of_system), ("Hi.", of_turn)):
        marked = {} if mark is None else {"cache_control": {"type": "ephemeral", **mark}}
        said.append([{"type": "text", "text": text, **marked}])
    turn = {"role": "user", "content": said[1]}
    async with counting(http_config) as (cluster, http):
        body = {"max_tokens": 4, "system": said[0], "messages": [turn]}
        (await http.post("/v1/messages", json=body, timeout=60)).raise_for_status()
        assert cluster.prefill.submits[0].retain_seconds == seconds


async def test_a_stream_is_pinged_until_it_begins_and_ends_with_its_client(
    config: RouterConfig, tmp_path: Path
) -> None:
    async with served(config, tmp_path, sse_keepalive=0.05) as (cluster, _):
        [worker] = cluster.workers
        url = f"http://{cluster.router.http_address}/v1/messages"
        async with httpx.AsyncClient(timeout=60) as http:
            async with http.stream("POST", url, json={**ASKED, "stream": True}) as answer:
                lines = answer.aiter_lines()
                assert await anext(lines) == "event: ping"
                submit = await worker.submitted()
                worker.say(submit, 0, (65,))
                while (line := await anext(lines)) != "event: message_start":
                    assert line in ("", "event: ping", 'data: {"type": "ping"}')
            await until(lambda: bool(worker.cancels))


async def test_a_message_that_is_aborted_by_its_calls_id(
    config: RouterConfig, tmp_path: Path
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        [worker] = cluster.workers
        worker.on_submit = None
        asked = {**ASKED, "extra_headers": {"x-request-id": "mine"}}
        call = asyncio.create_task(client.messages.create(**asked))
        worker.say(await worker.submitted(), 0, (65,))
        await cluster.stub.Abort(pb.AbortRequest(request_id="mine"))
        assert (await call).stop_reason == "max_tokens"


async def test_its_client_lists_the_models(config: RouterConfig, tmp_path: Path) -> None:
    async with served(config, tmp_path) as (_, client):
        listed = [model async for model in client.models.list()]
        assert [(one.id, one.type, one.display_name) for one in listed] == [
            ("counter", "model", "counter"),
            ("opus", "model", "opus"),
        ]
        assert listed[0].created_at.year > 2000
        assert (await client.models.retrieve("opus")).id == "opus"


async def test_tokens_are_counted(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying("Yes.", tokenizer)
        asked = {**ASKED, "system": "Be short.", "tools": [WEATHER]}
        message = await client.messages.create(**asked)
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == message.usage.input_tokens

        async def say_cached(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
            worker.say(submit, 0, (65,), end=LENGTH, cached_tokens=4)

        cluster.workers[0].on_submit = say_cached
        for message in (
            await client.messages.create(**{**asked, "max_tokens": 1}),
            await streamed(client, **{**asked, "max_tokens": 1}),
        ):
            assert message.usage.cache_read_input_tokens == 4
            assert message.usage.input_tokens == counted.input_tokens - 4
        long: Any = {"model": "", "messages": [{"role": "user", "content": "x " * 1000}]}
        assert (await client.messages.count_tokens(**long)).input_tokens > 512


@pytest.mark.parametrize(
    ("change", "status", "kind", "told"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: "),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"messages": [{"role": "x", "content": ""}]}, 400, "invalid_request_error", ".role: "),
        ({"temperature": -1.0}, 400, "invalid_request_error", "temperature: "),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences: "),
        ({"thinking": {"type": "x"}}, 400, "invalid_request_error", "thinking.type: "),
        ({"tools": [{"name": "x y"}]}, 400, "invalid_request_error", "tools: "),
        ({"tools": [{}]}, 400, "invalid_request_error", "tools[0].name: "),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            *(400, "invalid_request_error", "output_config.format: "),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            *(400, "invalid_request_error", "messages[0].content[0]: "),
        ),
        (
            {"messages": [{"role": "user", "content": "x " * 1000}]},
            *(400, "invalid_request_error", "prompt is too long"),
        ),
        ({"model": "other"}, 404, "not_found_error", "model: "),
        ({"metadata": "x" * 70_000}, 413, "request_too_large", "bytes"),
    ],
)
async def test_refusals(
    shared_http: httpx.AsyncClient, change: dict[str, Any], status: int, kind: str, told: str
) -> None:
    body = {**ASKED, "model": "counter", **change}
    answer = await shared_http.post("/v1/messages?beta=true", json=body)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert told in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]


async def test_refusals_that_are_no_bodys_fault(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    changes: dict[str, Any] = {"auth_token_file": tokens, "worker_wait": 0.0}
    async with served(config, tmp_path, **changes) as (cluster, client):
        [worker] = cluster.workers
        worker.on_submit = None
        good, bad = client.with_options(api_key="a"), client.with_options(api_key="o")
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.messages.create(**ASKED)
        assert unknown.value.type == "authentication_error"
        with pytest.raises(anthropic.PermissionDeniedError):
            await bad.messages.create(**ASKED)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await good.messages.batches.list()
        assert missing.value.type == "not_found_error"

        async def one_token(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
            worker.say(submit, 0, (65,))

        worker.on_submit = one_token
        async with good.messages.stream(**ASKED) as stream:
            assert (await anext(aiter(stream))).type == "message_start"
            with pytest.raises(anthropic.RateLimitError):
                await good.messages.create(**ASKED)
            await worker.stop()
            with pytest.raises(anthropic.APIStatusError) as failed:
                await stream.get_final_message()
        # An error in mid-stream is an event.
        assert (failed.value.status_code, failed.value.type) == (200, "overloaded_error")
        with pytest.raises(anthropic.APIStatusError) as away:
            await good.messages.create(**ASKED)
        assert (away.value.status_code, away.value.type) == (503, "overloaded_error")


def chat_of(**body: Any) -> dict[str, Any]:
    """The members of the chat that are not null, which a chat reads."""
    members = chat_members(read_body(MessagesRequest, {**ASKED, **body}), [])
    read_body(ChatCompletionRequest, members)
    return {name: value for name, value in members.items() if value is not None}


def test_a_conversation_becomes_a_chat() -> None:
    def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
        return {"role": role, "content": list(blocks)}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    def result(content: Any, **more: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": "1", "content": content, **more}

    turn = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("I "),
        text("look."),
        {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "x"}},
        {"type": "tool_use", "id": "3", "name": "weather", "input": ["x"]},
        {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}},
    ]
    plain = {"type": "text", "media_type": "text/plain", "data": "words"}
    found = {"type": "search_result", "title": "t", "source": "s", "content": [text("f")]}
    chat = chat_of(
        system=[text("a"), text("b")],
        messages=[
            {"role": "system", "content": "c"},
            said(text("one"), {"type": "document", "source": plain, "title": "D"}),
            {"role": "user", "content": "two"},
            said(*turn, role="assistant"),
            said(text("and"), result([text("x"), {"type": "image", "source": {}}, found])),
            said(result("no", is_error=True)),
            {"role": "system", "content": "now"},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "I"},
        ],
    )
    functions = {"1": {"city": "x"}, "3": '["x"]'}  # arguments that are no object, as they were
    calls = [
        {"id": one, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for one, arguments in functions.items()
    ]
    unread = "[an image or a file, which this model cannot read]"
    assert chat["messages"] == [
        {"role": "system", "content": ["a", "b", "c"]},
        {"role": "user", "content": ["one", "D", "words", "two"]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "1", "content": ["x", unread, "t", "s", "f"]},
        {"role": "user", "content": ["and"]},
        {"role": "tool", "tool_call_id": "1", "content": ["Error: no"]},
        {"role": "system", "content": ["now"]},
        {"role": "user", "content": ["go"]},
        {"role": "assistant", "content": "I"},
    ]
    assert chat["continue_final_message"] is True
    with pytest.raises(InvalidField, match="messages: must not end with a call"):
        chat_of(messages=[said(*turn, role="assistant")])


def test_a_turn_of_very_many_blocks_is_read_in_linear_time() -> None:
    words = "x" * 300
    blocks = [{"type": "text", "text": words}, {"type": "thinking", "thinking": words}] * 20_000
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": blocks}]
    begun = time.process_time()
    *_, turn = chat_of(messages=turns)["messages"]
    assert time.process_time() - begun < 2
    assert len(turn["content"]) == len(turn["reasoning"]) == 20_000 * 300


BLOCKS_OF_ANY_KIND = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "document", "x"])},
    optional={
        name: JSON | st.just("x")
        for name in ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source")
    },
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": JSON | st.lists(BLOCKS_OF_ANY_KIND, max_size=3),
    }
)
MEMBERS = ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "seed")


@settings(max_examples=30, deadline=None, database=None)
@given(
    turns=st.lists(TURNS, min_size=1, max_size=3),
    other=st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=1),
)
def test_any_body_becomes_a_chat_or_is_refused(
    turns: list[dict[str, Any]], other: dict[str, Any]
) -> None:
    with contextlib.suppress(InvalidField):
        chat_of(messages=turns, **other)


def test_parameters_become_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    held = {"type": "json_schema", "json_schema": {"schema": schema}}
    off = {"enable_thinking": False, "include_reasoning": False}
    on = {"enable_thinking": True, "include_reasoning": True}
    named = {"type": "function", "function": {"name": "weather"}}
    alone = {"disable_parallel_tool_use": True}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"max_completion_tokens": 100, **off}),
        ({"stop_sequences": ["x"], "top_k": 4, "seed": 5}, {"stop": ["x"], "top_k": 4, "seed": 5}),
        ({"thinking": {"type": "disabled"}}, off),
        ({"thinking": {"type": "adaptive"}}, on),
        ({"thinking": THINKS}, {**on, "thinking_token_budget": 1024}),
        ({"thinking": {**THINKS, "display": "omitted"}}, {**on, "include_reasoning": False}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ({"output_config": {"format": form}}, {"response_format": held}),
        ({"output_format": form}, {"response_format": held}),
        ({"tool_choice": {"type": "auto", **alone}}, {"parallel_tool_calls": False}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, {"tool_choice": named}),
    ]
    for body, members in cases:
        chat = chat_of(tools=[{**WEATHER, "strict": True}, TIME], **body)
        assert members.items() <= chat.items(), body
    function = {
        "name": "weather",
        "description": "Of a city.",
        "parameters": WEATHER["input_schema"],
        "strict": True,
    }
    assert chat["tools"][0] == {"type": "function", "function": function}
