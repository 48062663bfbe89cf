"""Calls of tools, and reasoning, by OpenAI's client: streamed as whole."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from kvrelay.router.config import ReasoningFormat, RouterConfig, ToolParser
from kvrelay.router.doors.http.chat_tools import (
    Dialect,
    arguments_of,
    calls_schema,
    read_tools,
)
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.text.grammar import GrammarCompiler
from kvrelay.text.output_parsers.formats import TOOL_FORMATS
from kvrelay.text.token_texts import TokenTexts
from kvrelay.v1 import inference_pb2, worker_pb2
from kvrelay.wire.submit import StructuredOutput
from tests.vocabularies import byte_vocabulary

from ..cluster import Cluster, running
from ..scripted_worker import ScriptedWorker, choices_of
from .client import CHAT, with_http

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    '{# as <tool_call>{"name": …, "arguments": …}</tool_call> #}'
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string", "maxLength": 20}},
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ARGUMENTS = '{"city": "Köln \\"am\\" Rhein"}'
CALLS = (
    f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time"}\n</tool_call>'
)
EOS = 400
ASKED: Any = CHAT["messages"]


LENGTH = worker_pb2.RequestEnd(reason=worker_pb2.RequestEnd.REASON_LENGTH)


def saying(
    text: str, tokenizer: Tokenizer, cut: worker_pb2.RequestEnd | None = None
) -> Callable[..., Any]:
    """A worker that says a text, token by token; it is cut off, or ends by itself."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    async def say(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        end = worker_pb2.RequestEnd(reason=worker_pb2.RequestEnd.REASON_STOP, matched_token_id=EOS)
        for choice in choices_of(submit):
            for position, token in enumerate(ids):
                is_last = cut is not None and position == len(ids) - 1
                last = {"end": cut} if is_last else {}
                worker.say(submit, position, (token,), choice=choice, **last)
            if cut is None:
                worker.say(submit, len(ids), (EOS,), choice=choice, end=end)

    return say


@asynccontextmanager
async def served(
    config: RouterConfig, folder: Path, template: str = HERMES, **changes: Any
) -> AsyncIterator[tuple[Cluster, openai.AsyncOpenAI]]:
    config = with_http(config, folder, **changes)
    assert config.chat_template is not None
    config.chat_template.write_text(template)
    async with running(replace(config, default_max_tokens=300), "aggregated-0") as cluster:
        base = f"http://{cluster.router.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
            yield cluster, client


async def test_an_empty_list_of_tools_is_none_to_a_template(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{% if tools is none %}none{% else %}some{% endif %}"
    body = {"messages": CHAT["messages"], "tools": []}
    async with (
        served(config, tmp_path, template) as (cluster, _client),
        httpx.AsyncClient() as http,
    ):
        url = f"http://{cluster.router.http_address}/tokenize"
        told = (await http.post(url, json=body)).json()
    assert tokenizer.decode(told["tokens"]) == "none"


async def ask(client: openai.AsyncOpenAI, **changes: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": "counter", "messages": CHAT["messages"], "tools": TOOLS, **changes}
    )


async def streamed(client: openai.AsyncOpenAI, **changes: Any) -> tuple[dict[str, Any], str]:
    """The message that the deltas make together, as clients do it, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason = ""
    async for chunk in await ask(client, stream=True, **changes):
        [choice] = chunk.choices
        delta, reason = choice.delta, choice.finish_reason or reason
        message["content"] += delta.content or ""
        message["reasoning"] += (delta.model_extra or {}).get("reasoning_content") or ""
        for call in delta.tool_calls or []:
            if call.index == len(message["calls"]):
                assert call.id
                assert call.type == "function"
                message["calls"].append([call.function.name, ""])
            else:
                assert call.id is None
                assert call.function.name is None
            message["calls"][call.index][1] += call.function.arguments
    return message, reason


def whole(answer: Any) -> tuple[dict[str, Any], str]:
    [choice] = answer.choices
    said = choice.message
    calls = [[call.function.name, call.function.arguments] for call in said.tool_calls or []]
    reasoning = (said.model_extra or {}).get("reasoning_content") or ""
    message = {"content": said.content or "", "reasoning": reasoning, "calls": calls}
    return message, choice.finish_reason


async def test_calls_streamed_and_whole(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)
        expected = {
            "content": "I look.",
            "reasoning": "",
            "calls": [["weather", ARGUMENTS], ["time", "{}"]],
        }
        assert whole(await ask(client)) == (expected, "tool_calls")
        assert await streamed(client) == (expected, "tool_calls")
        prompt = tokenizer.decode(list(cluster.workers[0].submits[0].input_ids))
        assert '"name": "weather"' in prompt
        sent = cluster.workers[0].submits[0].sampling_params
        assert not sent.skip_special_tokens, "tags are special tokens in some vocabularies"
        # Without tools, and with tool_choice none, it is content.
        for changes in ({"tool_choice": "none"}, {"tools": openai.omit}):
            message, reason = await streamed(client, **changes)
            assert (message["content"], reason) == (CALLS, "stop")
            assert cluster.workers[0].submits[-1].sampling_params.skip_special_tokens


async def test_the_first_call_alone(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)
        expected = {"content": "I look.", "reasoning": "", "calls": [["weather", ARGUMENTS]]}
        assert whole(await ask(client, parallel_tool_calls=False)) == (expected, "tool_calls")
        assert await streamed(client, parallel_tool_calls=False) == (expected, "tool_calls")


async def test_each_of_several_choices_has_its_own_calls(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)
        answer = await ask(client, n=2)
        calls = [[one.function.name for one in c.message.tool_calls] for c in answer.choices]
        assert calls == [["weather", "time"]] * 2
        seen: dict[int, list[str]] = {0: [], 1: []}
        reasons = {}
        async for chunk in await ask(client, n=2, stream=True, logprobs=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    if call.function.name:
                        seen[choice.index].append(call.function.name)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert seen == {0: ["weather", "time"], 1: ["weather", "time"]}
        assert reasons == {0: "tool_calls", 1: "tool_calls"}


async def test_reasoning_before_calls(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    changes = {"reasoning_parser": ReasoningFormat.THINK}
    async with served(config, tmp_path, **changes) as (cluster, client):
        cluster.workers[0].on_submit = saying(f"<think>\nHm.\n</think>\n\n{CALLS}", tokenizer)
        for message, reason in (whole(await ask(client)), await streamed(client)):
            assert (message["reasoning"], message["content"]) == ("Hm.", "I look.")
            assert [name for name, _ in message["calls"]] == ["weather", "time"]
            assert reason == "tool_calls"


async def test_a_prompt_that_has_begun_to_reason(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{{ messages[0].content }}<think>\n"
    async with served(config, tmp_path, template) as (cluster, client):
        cluster.workers[0].on_submit = saying("Hm.\n</think>\n\nYes.", tokenizer)
        for message, _ in (
            whole(await ask(client, tools=openai.omit)),
            await streamed(client, tools=openai.omit, n=1),
        ):
            assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


async def test_a_form_beside_tools_that_may_be_called(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The answer has the form, or is calls."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"name": "x", "schema": schema}
    form: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": described}}
    async with served(config, tmp_path) as (cluster, client):
        worker = cluster.workers[0]
        call = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
        for text, content, calls, reason in [
            ('{"a": 1}', '{"a": 1}', [], "stop"),
            (call, "", [["weather", ARGUMENTS]], "tool_calls"),
        ]:
            worker.on_submit = saying(text, tokenizer)
            said = {"content": content, "reasoning": "", "calls": calls}
            assert whole(await ask(client, **form)) == (said, reason)
            assert await streamed(client, **form) == (said, reason)
        wanted = worker.submits[-1].sampling_params.structured_output
        compiled = GrammarCompiler(byte_vocabulary).compile(
            StructuredOutput(grammar=wanted.grammar)
        )
        for text, is_good in [
            ('{"a": 1}', True),
            (call, True),
            ('{"a": "x"}', False),
            (call.replace("weather", "other"), False),
            ("words", False),
        ]:
            matcher = compiled.deep_copy()
            taken = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
            assert taken is is_good, text
        worker.on_submit = saying('{"a": 1}', tokenizer)
        unlike = {"type": "object", "properties": {"b": {"type": "array", "uniqueItems": True}}}
        tool = {"type": "function", "function": {"name": "other", "parameters": unlike}}
        await ask(client, **form, tools=[tool])
        wanted = worker.submits[-1].sampling_params.structured_output
        assert wanted.grammar, "a tool that is not strict has any arguments"
        described["schema"] = {"properties": {"b": {"type": "array", "uniqueItems": True}}}
        place = r"response_format\.json_schema\.schema: .*uniqueItems.* at /properties/b"
        with pytest.raises(openai.BadRequestError, match=place):
            await ask(client, **form)
        worker.on_submit = saying('{"a": 1}', tokenizer)
        other = {"structured_outputs": {"json": schema}}
        await ask(client, response_format={"type": "text"}, extra_body=other)
        wanted = worker.submits[-1].sampling_params.structured_output
        assert wanted.HasField("json_schema"), "it is no response format"


def test_a_form_that_is_too_long_beside_calls_stands_alone(tokenizer: Tokenizer) -> None:
    many = {f"p{number}-{'x' * 80}": {"type": "integer"} for number in range(450)}
    schema = {"type": "object", "properties": many}
    function = {"name": "f", "strict": True, "parameters": schema}
    members: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    form = inference_pb2.StructuredOutput(json_schema=json.dumps(schema))
    params = inference_pb2.SamplingParams(structured_output=form)
    dialect = Dialect(None, TOOL_FORMATS["hermes"], calls_are_parsed=True, reasoning=None)
    body = ChatCompletionRequest(**members)
    read_tools(body, dialect, params, TokenTexts(tokenizer))
    assert params.structured_output == form


RECURSIVE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["v"],
    "additionalProperties": False,
}
SHARED = [
    {"properties": {"x": {"$ref": "#/$defs/s"}}, "required": ["x"], "$defs": {"s": {"type": kind}}}
    for kind in ("null", "boolean")
]
OTHER = {
    "properties": {
        "a": {"enum": ["y"], "description": "z" * 60_000},
        "b": {"$ref": "#/properties/a"},
    },
    "required": ["b"],
}
WITH_ID = {
    "$id": "https://a/b",
    "properties": {"next": {"$ref": "https://a/b#"}, "c": {"$ref": "/b#/components/C"}},
    "components": {"C": {"properties": {"d": {"$ref": "b#/components/D"}}}, "D": {"type": "null"}},
}
NAMED = [
    {
        "properties": {"x": {"$ref": "T"}, "y": {"$ref": "https://a/T#/properties/z"}},
        "$defs": {
            "T": {"$id": "T", "type": kind},
            "U": {
                "$id": "https://a/T",
                "properties": {"z": {"$ref": "#/$defs/z"}},
                "$defs": {"z": {"type": kind}},
            },
        },
    }
    for kind in ("null", "boolean")
]
ELSEWHERE = {
    "$ref": "#/components/schemas/A",
    "components": {
        "schemas": {
            "A": {
                "type": "object",
                "properties": {"n": {"$ref": "#/components/schemas/A"}, "i": {"type": "integer"}},
            }
        }
    },
}
ANCHORED = [
    {"properties": {"x": {"$ref": "#s"}}, "$defs": {"s": {"$anchor": "s", "type": kind}}}
    for kind in ("null", "boolean")
]
PARAMETERS: dict[str, Any] = {
    "list": RECURSIVE, "one": SHARED[0], "two": SHARED[1], "other": OTHER, "id": WITH_ID,
    "none": None, "named": NAMED[0], "names": NAMED[1], "elsewhere": ELSEWHERE,
    "anchor": ANCHORED[0], "anchors": ANCHORED[1],
}  # fmt: skip
CALLED = [
    ("list", '{"v":3,"next":{"v":4,"next":{"v":5}}}', True),
    ("list", '{"v":3,"next":[{"name":"list","parameters":{"v":3}}]}', False),
    ("one", '{"x":null}', True),
    ("one", '{"x":true}', False),
    ("two", '{"x":true}', True),
    ("other", '{"a":"y","b":"y"}', True),
    ("other", '{"b":"n"}', False),
    ("id", '{"next":{"next":{}}}', True),
    ("id", '{"c":{"d":null}}', True),
    ("id", '{"c":{"d":1}}', False),
    ("id", '{"c":{"e":1}}', False),
    ("named", '{"x":null,"y":null}', True),
    ("named", '{"y":true}', False),
    ("names", '{"x":true,"y":true}', True),
    ("names", '{"x":null}', False),
    ("none", "{}", True),
    ("none", '{"x":1}', False),
    ("elsewhere", '{"n":{"n":{"i":1}}}', True),
    ("elsewhere", '{"n":[]}', False),
    ("elsewhere", '{"n":{"more":1}}', False),
    ("anchor", '{"x":null}', True),
    ("anchor", '{"x":true}', False),
    ("anchors", '{"x":true}', True),
]


def test_a_required_call_has_arguments_by_its_own_schema() -> None:
    """References lead into their own tool, and what is for people does not count."""
    functions = {name: {"parameters": schema} for name, schema in PARAMETERS.items()}
    schema = calls_schema({name: arguments_of(one) for name, one in functions.items()}, None)
    assert len(schema) < 4096
    compiled = GrammarCompiler(byte_vocabulary).compile(StructuredOutput(json_schema=schema))
    for name, arguments, is_good in CALLED:
        text = f'[{{"name":"{name}","parameters":{arguments}}}]'
        matcher = compiled.deep_copy()
        taken = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
        assert taken is is_good, text
    assert PARAMETERS["id"] == WITH_ID, "what the template is shown stays as it was"


async def test_a_tool_that_must_be_called(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """By a grammar, so that the chat template need not know tools."""
    named = {"type": "function", "function": {"name": "weather"}}
    async with served(config, tmp_path, "{{ messages[0].content }}") as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying(ARGUMENTS, tokenizer)
        expected = {"content": "", "reasoning": "", "calls": [["weather", ARGUMENTS]]}
        assert whole(await ask(client, tool_choice=named)) == (expected, "stop")
        assert await streamed(client, tool_choice=named) == (expected, "stop")
        sent = worker.submits[0].sampling_params.structured_output.json_schema
        assert json.loads(sent) == WEATHER["function"]["parameters"]

        other = '{"name":"time","parameters":{}}'
        listed = f'[{{"name": "weather", "parameters": {ARGUMENTS}}},{other}]'
        worker.on_submit = saying(listed, tokenizer)
        expected["calls"] = [["weather", ARGUMENTS], ["time", "{}"]]
        assert whole(await ask(client, tool_choice="required")) == (expected, "tool_calls")
        assert await streamed(client, tool_choice="required") == (expected, "tool_calls")
        sent = worker.submits[-1].sampling_params.structured_output.json_schema
        assert json.loads(sent)["minItems"] == 1


KIMI = "{{ tools }}<|tool_call_argument_begin|>"
KIMI_CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
QWEN = "{{ tools }}<tool_call><function="
QWEN_CALLS = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nKöln "am" Rhein\n</parameter>\n'
    "</function>\n</tool_call>"
)
MISTRAL = "{{ tools }}[TOOL_CALLS][ARGS]"
MISTRAL_CALLS = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"


@pytest.mark.parametrize(("template", "text", "call_id"), [
    (KIMI, KIMI_CALLS, "functions.weather:3"),
    (QWEN, QWEN_CALLS, "call_[0-9a-f]{32}"),
    (MISTRAL, MISTRAL_CALLS, "[A-Za-z0-9]{9}"),
])  # fmt: skip
async def test_a_call_in_the_models_own_format(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, template: str, text: str,
    call_id: str,
) -> None:  # fmt: skip
    """By choice and by force, with an id that the model's template takes."""
    named = {"type": "function", "function": {"name": "weather"}}
    async with served(config, tmp_path, template) as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying(text, tokenizer)
        for choice, reason in (("auto", "tool_calls"), ("required", "tool_calls"), (named, "stop")):
            answer = await ask(client, tool_choice=choice)
            message, ended = whole(answer)
            assert [(name, json.loads(given)) for name, given in message["calls"]] == [
                ("weather", json.loads(ARGUMENTS))
            ]
            assert (message["content"], ended) == ("", reason)
            assert re.fullmatch(call_id, answer.choices[0].message.tool_calls[0].id)
            assert await streamed(client, tool_choice=choice) == (message, reason)
            sent = worker.submits[-1].sampling_params
            assert sent.structured_output.HasField("grammar") is (choice != "auto")
            assert not sent.skip_special_tokens


async def test_strict_calls_that_may_come(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A grammar holds them to their schemas, and the output still has reasoning and text."""
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    text = f"<think>Hm.</think>I look.\n{CALLS}"
    async with served(config, tmp_path, HERMES + "{# <think> #}") as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying(text, tokenizer)
        message, reason = whole(await ask(client, tools=strict))
        assert (message["reasoning"], reason) == ("Hm.", "tool_calls")
        assert message["content"] == "I look.\nI look."
        grammar = worker.submits[0].sampling_params.structured_output.grammar
        vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[EOS])
        compiled = GrammarCompiler(lambda: vocabulary).compile(StructuredOutput(grammar=grammar))
        for said, is_good in ((text.partition("\n<tool_call>\n{\"name\": \"time")[0], True),
                              (text.replace("city", "town"), False)):  # fmt: skip
            matcher = compiled.deep_copy()
            ids = tokenizer.encode(said, add_special_tokens=False).ids
            taken = matcher.consume_tokens(ids) and matcher.is_accepting()
            assert taken is is_good
        await ask(client)
        assert not worker.submits[-1].sampling_params.HasField("structured_output")
        await ask(client, tools=[*strict, {"type": "function", "function": BAD}])
        assert worker.submits[-1].sampling_params.HasField("structured_output")
        bad = {**BAD, "strict": True}
        with pytest.raises(openai.BadRequestError, match="tools"):
            await ask(client, tools=[{"type": "function", "function": bad}])


async def test_structural_tags_are_forms(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    async with served(config, tmp_path) as (cluster, client):
        worker = cluster.workers[0]
        worker.on_submit = saying("a<f>1</f>", tokenizer)
        for form in ({"response_format": tag}, {"structured_outputs": {"structural_tag": tag}},
                     {"structured_outputs": {"structural_tag": json.dumps(tag)}}):  # fmt: skip
            answer = await ask(client, tools=openai.omit, extra_body=form)
            assert answer.choices[0].message.content == "a<f>1</f>"
        grammars = {one.sampling_params.structured_output.grammar for one in worker.submits}
        assert len(grammars) == 1
        assert "<f" in grammars.pop()
        refusals: list[tuple[str, Any]] = [
            ("response_format", {"response_format": {**tag, "triggers": ["x"]}}),
            ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": {}}}),
        ]
        for place, form in refusals:
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, tools=openai.omit, extra_body=form)
            assert refused.value.param == place


async def test_a_form_that_the_format_cannot_tell_is_json(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Texts between tags can keep no format of a string, such as a date."""
    parameters = {"properties": {"day": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with served(config, tmp_path, QWEN) as (cluster, client):
        cluster.workers[0].on_submit = saying('[{"name":"f","parameters":{}}]', tokenizer)
        message, _ = whole(await ask(client, tools=tools, tool_choice="required"))
        assert message["calls"] == [["f", "{}"]]
        assert cluster.workers[0].submits[0].sampling_params.structured_output.json_schema


async def test_a_call_that_was_cut_off_is_none(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A client would run it; a stream, which has told it already, at least does not end by it."""
    nothing = {"content": "", "reasoning": "", "calls": []}
    named = {"type": "function", "function": {"name": "weather"}}
    begun = '{"city": "San'
    own = '<tool_call>\n{"name": "weather", "arguments": '
    cases: list[tuple[Any, str, list[list[str]]]] = [
        ("required", '<tool_call>\n{"name"', []),
        ("required", f"{own}{begun}", [["weather", begun]]),
        (named, f"{own}{begun}", [["weather", begun]]),
        ("auto", '<tool_call>\n{"na', []),
    ]
    async with served(config, tmp_path) as (cluster, client):
        for choice, text, told in cases:
            cluster.workers[0].on_submit = saying(text, tokenizer, LENGTH)
            assert whole(await ask(client, tool_choice=choice)) == (nothing, "length")
            expected = {**nothing, "calls": told}
            assert await streamed(client, tool_choice=choice) == (expected, "length")
        # A stop string within the arguments.
        text = '<tool_call>{"name": "f", "arguments": {"a": "b!'
        end = worker_pb2.RequestEnd(
            reason=worker_pb2.RequestEnd.REASON_STOP, matched_stop_string="!"
        )
        cluster.workers[0].on_submit = saying(text, tokenizer, end)
        assert whole(await ask(client, stop="!")) == (nothing, "stop")
        assert (await streamed(client, stop="!"))[1] == "stop"


async def test_a_prompt_that_goes_on_within_reasoning(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{{ messages[0].content }}{{ messages[1].content }}{# <think> #}"
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    async with served(config, tmp_path, template) as (cluster, client):
        cluster.workers[0].on_submit = saying(" b</think>c", tokenizer)
        for said, reasoning, content in [
            ("<think>a", " b", "c"),
            ("<think>", "b", "c"),
            ("<think>x</think>a", "", " b</think>c"),
        ]:
            body: dict[str, Any] = {
                "messages": [*ASKED, {"role": "assistant", "content": said}],
                "tools": openai.omit,
                "extra_body": goes_on,
            }
            for message, _ in (whole(await ask(client, **body)), await streamed(client, **body)):
                assert (message["reasoning"], message["content"]) == (reasoning, content)


async def test_earlier_calls_are_shown_to_the_template(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "sun"},
    ]
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying("Sun.", tokenizer)
        assert whole(await ask(client, messages=messages))[0]["content"] == "Sun."
        prompt = tokenizer.decode(list(cluster.workers[0].submits[0].input_ids))
        assert prompt.endswith('<assistant>Köln "am" Rhein<tool>sun')
    template = "{{ '<' + messages[1].tool_calls[0].function.arguments + '>' }}"
    async with served(config, tmp_path, template) as (cluster, client):  # as DeepSeek's does
        cluster.workers[0].on_submit = saying("Sun.", tokenizer)
        await ask(client, messages=messages, tools=openai.omit)
        prompt = tokenizer.decode(list(cluster.workers[0].submits[0].input_ids))
        assert prompt == f"<{ARGUMENTS}>"


GPT_OSS = (
    "{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.content and message.thinking %}{{ raise_exception('both') }}{%- endif %}"
    "{{ message.content or message.thinking }}{{ message.tool_calls[0].function.name }}"
    "{%- else %}{{ message.content }}{%- endif %}{%- endfor %}{# tools <|channel|> #}"
)


async def test_an_answer_of_gpt_oss_is_sent_back(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    answers: list[tuple[dict[str, Any], str]] = [
        ({"content": "I look.", "reasoning": "Hm.", "tool_calls": [call]}, "I look.weather"),
        ({"content": None, "reasoning": "Hm.", "tool_calls": [call]}, "Hm.weather"),
        ({"content": "I look.", "tool_calls": []}, "I look."),
        ({"content": "I look.", "tool_calls": None}, "I look."),
    ]
    for said, shown in answers:
        async with served(config, tmp_path, GPT_OSS) as (cluster, client):
            cluster.workers[0].on_submit = saying("Sun.", tokenizer)
            await ask(client, messages=[{"role": "assistant", **said}])
            prompt = list(cluster.workers[0].submits[0].input_ids)
            assert tokenizer.decode(prompt) == shown


@pytest.mark.parametrize(
    "arguments", ['{"city":"San', "null", "[1]", '{"a":NaN}', '"Rome"', "", None]
)
async def test_a_conversation_goes_on_after_arguments_that_are_broken(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, arguments: Any
) -> None:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "x", "type": "function", "function": function}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    is_none = arguments in ("null", "", None)
    shown = "messages[1].tool_calls[0].function.arguments"
    for template, expected in [
        (f"{{{{ {shown} }}}}", "{}" if is_none else str(arguments)),
        (
            f"<{{% for k, v in {shown}|items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}",
            "<" if is_none else f"<arguments={arguments}",
        ),
    ]:
        async with served(config, tmp_path, template) as (cluster, client):
            cluster.workers[0].on_submit = saying("Sun.", tokenizer)
            answer = await ask(client, messages=messages, tools=openai.omit)
            assert whole(answer)[0]["content"] == "Sun."
            prompt = tokenizer.decode(list(cluster.workers[0].submits[0].input_ids))
            assert prompt == expected


HERE = {"x": 1}
DEEP: list[dict[str, Any]] = [
    {"tools": [{**TIME, "function": {"name": "f", "parameters": HERE}}], "tool_choice": "required"},
    {"tools": [{**TIME, "function": {"name": "f", "parameters": HERE}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": HERE}}},
    {"chat_template_kwargs": HERE},
    {"metadata": HERE},
    {"messages": [{"role": "user", "content": "x", "more": HERE}]},
]


async def test_depth_is_refused_or_served(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Whatever can be parsed can be written again, or is refused."""
    async with (
        served(config, tmp_path, HERMES + "{{ messages | tojson }}") as (cluster, client),
        httpx.AsyncClient(base_url=str(client.base_url)) as http,
    ):
        cluster.workers[0].on_submit = saying("x", tokenizer)
        for body in DEEP:
            for depth in (100, *range(880, 990, 6)):
                text = json.dumps({**CHAT, **body})
                deep = text.replace(json.dumps(HERE), '{"x":' * depth + "{}" + "}" * depth)
                answer = await http.post("chat/completions", content=deep)
                assert answer.status_code in (200, 400), (depth, answer.text)


async def test_the_same_form_by_two_names_is_one(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    grammar = {"grammar": 'start: "x"'}
    async with (
        served(config, tmp_path) as (cluster, client),
        httpx.AsyncClient(base_url=str(client.base_url)) as http,
    ):
        cluster.workers[0].on_submit = saying("x", tokenizer)
        body = {**CHAT, "structured_outputs": grammar, "guided_decoding_backend": "guidance"}
        for other, status in [(grammar["grammar"], 200), ('start: "y"', 400)]:
            answer = await http.post("chat/completions", json={**body, "guided_grammar": other})
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == "guided_grammar"


BAD = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [TIME] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "no"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": BAD}], "tool_choice": "required"}, "tools"),
    *(
        ({"tools": [TIME, {**TIME, "function": {"name": "f", "parameters": {"type": kind}}}],
          "tool_choice": choice}, "tools[1].function.parameters.type")
        for kind in ("string", ["null", "array"], 1) for choice in ("auto", "required")
    ),
]  # fmt: skip


async def test_what_cannot_be_served_is_refused(config: RouterConfig, tmp_path: Path) -> None:
    async with served(config, tmp_path) as (cluster, client):
        base = str(client.base_url)
        async with httpx.AsyncClient(base_url=base) as http:
            for changes, param in REFUSED:
                body = {**CHAT, "tools": TOOLS, **changes}
                answer = await http.post("chat/completions", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                    changes
                )
        assert not cluster.workers[0].submits


@pytest.mark.parametrize(
    ("parser", "status"), [(ToolParser.AUTO, 400), (ToolParser.NONE, 200), (ToolParser.HERMES, 200)]
)
async def test_tools_that_nobody_shows(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer, parser: ToolParser, status: int
) -> None:
    """A template that ignores tools: no client is left to believe otherwise, but by an option."""
    changes = {"tool_call_parser": parser}
    async with served(config, tmp_path, "{{ messages[0].content }}", **changes) as (
        cluster,
        client,
    ):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)
        if status == 400:
            with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
                await ask(client)
            return
        message, _ = whole(await ask(client))
        assert bool(message["calls"]) is (parser is ToolParser.HERMES)


async def test_tokens_of_parts_that_are_held_back_are_told(
    config: RouterConfig, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(CALLS, add_special_tokens=False).ids
    async with served(config, tmp_path) as (cluster, client):
        cluster.workers[0].on_submit = saying(CALLS, tokenizer)
        told: list[int] = []
        stream = await ask(client, stream=True, extra_body={"return_token_ids": True})
        async for chunk in stream:
            told += chunk.choices[0].model_extra.get("token_ids") or []
        assert told == [*ids, EOS]
