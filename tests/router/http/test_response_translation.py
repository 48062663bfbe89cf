"""The body of /v1/responses as a chat, and a chat's output as items and events."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from kvrelay.router.doors.http.answers import Shown
from kvrelay.router.doors.http.errors import internal_error
from kvrelay.router.doors.http.left_out import LeftOut
from kvrelay.router.doors.http.responses.called_tools import CalledTool
from kvrelay.router.doors.http.responses.custom_input import CustomInput
from kvrelay.router.doors.http.responses.response_chat import ResponsesCall, read_responses
from kvrelay.router.doors.http.responses.response_output import ResponseOutput
from kvrelay.router.doors.http.responses.responses_reply import ResponsesReply
from kvrelay.router.errors import InvalidField
from kvrelay.router.metrics import RouterMetrics
from kvrelay.text.output_parsers.pieces import OutputPiece

PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Of others.",
    "tools": [{**LOOK, "name": "wait"}],
}


def read(given: Any = "hi", **members: Any) -> ResponsesCall:
    return read_responses({"input": given, **members})


def messages(given: Any, **members: Any) -> list[Any]:
    return [dict(one) for one in read(given, **members).chat.messages]


def said(role: str, content: Any, **members: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **members}


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_a_text_is_the_users() -> None:
    assert messages("hi") == [said("user", "hi")]
    assert messages("hi", instructions="Be.") == [said("system", "Be."), said("user", "hi")]


def test_all_that_the_system_says_first_is_one_message() -> None:
    """Some templates take one alone, and only as the first."""
    given = [
        {"type": "message", **said("developer", [part("a"), part("b")])},
        said("system", "c"),
        said("user", "hi"),
        said("developer", "d"),
    ]
    assert messages(given, instructions="Be.") == [
        said("system", "Be.\n\na\nb\n\nc"),
        said("user", "hi"),
        said("developer", "d"),
    ]


def test_a_turn_of_the_assistant_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
    given = [
        said("user", "hi"),
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [part("Hm.", "reasoning_text")],
        },
        {"type": "message", "id": "m", **said("assistant", [part("I look.", "output_text")])},
        {**call, "namespace": "agents"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x\n"},
        {"type": "local_shell_call", "id": "l", "call_id": "c3", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [part("done")]},
        {"type": "local_shell_call_output", "id": "c3", "output": '{"output": "."}'},
        {"type": "reasoning", "summary": [part("So.", "summary_text")], "content": None},
        said("assistant", "A."),
        said("assistant", "B."),
    ]
    shown = messages(given)
    calls = shown[1].pop("tool_calls")
    assert [(one["id"], one["function"]["name"]) for one in calls] == [
        ("c1", "agents__look"),
        ("c2", "apply_patch"),
        ("c3", "local_shell"),
    ]
    assert [dict(one["function"]["arguments"]) for one in calls] == [
        {"a": 1},
        {"input": "x\n"},
        {"command": ["ls"]},
    ]
    assert shown == [
        said("user", "hi"),
        said("assistant", "I look.", reasoning_content="Hm."),
        said("tool", "seen", tool_call_id="c1", name="agents__look"),
        said("tool", "done", tool_call_id="c2", name="apply_patch"),
        said("tool", '{"output": "."}', tool_call_id="c3", name="local_shell"),
        said("assistant", "A.", reasoning_content="So."),
        said("assistant", "B."),
    ]


def test_very_many_items_of_one_message_are_read_in_linear_time() -> None:
    thought = {"type": "reasoning", "content": [part("x" * 300, "reasoning_text")]}
    begun = time.process_time()
    [lead, turn] = messages([said("system", "y" * 300)] * 20_000 + [thought] * 20_000)
    assert time.process_time() - begun < 2
    assert len(lead["content"]) == 20_000 * 302 - 2
    assert len(turn["reasoning_content"]) == 20_000 * 301 - 1


def test_a_tools_output_without_text_is_told_all_the_same() -> None:
    """An agent sends its history again and again: a refusal would end it."""
    outputs: Any = [
        [part("a"), {"type": "input_image", "image_url": "data:"}],
        [{"stdout": "b", "outcome": {"type": "exit"}}],
    ]
    given = [{"type": "shell_call_output", "call_id": "c", "output": one} for one in outputs]
    first, second = messages(given)
    assert first["content"] == "a\n(left out: input_image, which this model cannot read)"
    assert json.loads(second["content"]) == outputs[1]


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([{"type": "item_reference", "id": "x"}], "input[0].item_reference"),
        ([{"id": "x"}], "input[0].item_reference"),
        ([said("user", [{"type": "input_image", "image_url": "x"}])], "input[0].content[0]"),
        ([said("user", 1)], "input[0].content"),
        ([said("robot", "x")], "input[0].role"),
        ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "f", "arguments": "{}"}], "input[0].name"),
        ([{"type": "shell_call", "call_id": "f"}], "input[0].action"),
        ([{"type": 1}], "input[0].type"),
        ([1], "input[0]"),
        ([], "input"),
        (7, "input"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(given: Any, place: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(given)
    assert caught.value.field == place


def test_tools_are_functions_of_a_chat() -> None:
    call = read(tools=[LOOK, PATCH, AGENTS, {"type": "web_search"}, {"type": "mcp"}])
    assert call.left_out == ["tools.web_search", "tools.mcp"]
    assert call.tools.served == [LOOK, PATCH, AGENTS]
    functions = [one["function"] for one in call.chat.tools or ()]
    assert [one["name"] for one in functions] == ["look", "apply_patch", "agents__wait"]
    assert functions[0] == {"name": "look", "parameters": {"type": "object"}}
    assert functions[1]["description"].startswith("Edits files.")
    assert functions[1]["description"].endswith('start: "x"')
    assert functions[1]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert call.tools.told_as("agents__wait") == CalledTool("wait", "agents")
    assert call.tools.told_as("apply_patch").is_custom
    assert call.tools.told_as("other") == CalledTool("other")


def test_a_custom_input_by_a_regular_expression_is_held_to_it() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    tool = (read(tools=[{**PATCH, "format": form}]).chat.tools or [])[0]
    assert tool["function"]["strict"]
    assert tool["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"


def test_the_choice_of_a_tool() -> None:
    tools = [LOOK, PATCH, AGENTS]
    one: Any = read(tools=tools, tool_choice={"type": "custom", "name": "apply_patch"}).chat
    assert one.tool_choice.function.name == "apply_patch"
    assert read(tools=tools, tool_choice="required").chat.tool_choice == "required"
    named = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}
    some = read(tools=tools, tool_choice=choice).chat
    assert some.tool_choice == "required"
    assert [tool["function"]["name"] for tool in some.tools or ()] == ["look"]


@pytest.mark.parametrize(
    ("members", "place"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "x"}}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": "x"}, "temperature"),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}, {**LOOK, "name": "?"}]}, "tools[1].name"),
        ({"tools": [{**AGENTS, "tools": [{**LOOK, "name": "?"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**AGENTS, "tools": 1}]}, "tools[0].tools"),
        ({"tools": [{**LOOK, "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [{**PATCH, "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"tools": [LOOK], "tool_choice": "x"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"top_k": "x"}, "top_k"),
    ],
)
def test_what_cannot_be_served_is_named_as_it_was_sent(members: Any, place: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(**members)
    assert caught.value.field == place
    assert str(caught.value).startswith(f"{place}: ")


def test_members_of_a_chat_and_those_that_are_left_out() -> None:
    schema = {"type": "object"}
    call = read(
        [said("user", "x"), {"type": "web_search_call", "id": "ws"}],
        store=False,
        top_k=3,
        seed=7,
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        truncation="auto",
        max_tool_calls=1,
        n=2,
        moderation=None,
    )
    chat = call.chat
    assert (chat.top_k, chat.seed, chat.max_completion_tokens) == (3, 7, 5)
    assert chat.sampling_params().n == 0
    assert chat.reasoning_effort == "low"
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert json.loads(str(chat.response_format.json_schema.json_schema)) == schema
    fields = ["max_tool_calls", "n", "truncation"]
    assert {*call.left_out} == {*(f"fields.{one}" for one in fields), "input.web_search_call"}


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
TYPES = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
        *("local_shell_call", "shell_call_output", "item_reference", "function", "custom"),
        *("namespace", "web_search", "allowed_tools", "json_schema", "grammar", "input_text"),
    ]
)
NAMES = st.sampled_from(
    [
        *("type", "role", "content", "text", "name", "namespace", "arguments", "call_id", "output"),
        *("input", "action", "tools", "mode", "format", "schema", "syntax", "definition", "id"),
        *("effort", "summary", "parameters", "description", "strict"),
    ]
)
ANYTHING = st.recursive(
    SCALAR | TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
OBJECT = st.fixed_dictionaries(
    {"type": TYPES, "name": st.just("f"), "call_id": st.just("c"), "role": st.just("user")},
    optional={"content": ANYTHING, "tools": ANYTHING, "output": ANYTHING, "format": ANYTHING},
)
MEMBERS = st.fixed_dictionaries(
    {"input": ANYTHING | st.lists(OBJECT, max_size=4)},
    optional={
        "tools": st.lists(OBJECT | ANYTHING, max_size=3),
        "tool_choice": OBJECT | ANYTHING,
        "text": st.fixed_dictionaries({"format": OBJECT}) | ANYTHING,
        "reasoning": ANYTHING,
        "instructions": ANYTHING,
        "metadata": ANYTHING,
    },
)


@settings(max_examples=40, deadline=None, database=None)
@given(members=MEMBERS)
def test_any_body_is_read_or_refused(members: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidField):
        read_responses(members)


UNPAIRED = ["\ud800 x", "\udc00" * 3, "\ud800\ud800"]
TEXTS = ["a\n", '"\\/', "é 🎉 \u2028", "\\u0041", "", 'x"}', *UNPAIRED]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_custom_input_wherever_its_json_is_cut(text: str, is_ascii: bool) -> None:
    is_ascii |= any("\ud800" <= one <= "\udfff" for one in text)
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    for cut in range(len(written) + 1):
        reader = CustomInput()
        pieces = [reader.push(written[:cut]), reader.push(written[cut:])]
        assert "".join([*pieces, reader.finish()]) == text
    reader = CustomInput()
    pieces = [reader.push(one) for one in written]
    assert "".join([*pieces, reader.finish()]) == text
    if text.isprintable():
        assert len([one for one in pieces if one]) == len(text), "each character at once"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": 1, "input": "a"}', "a"),
        ('{"other": "a"}', '{"other": "a"}'),
        ('"a"', "a"),
        ("no JSON", "no JSON"),
        ("", ""),
        ('{"input": "a\\x b\\', "a\\x b"),
        ('{"input": "a\\ud8', "a\\ud8"),
        ('{"other": "' + "x" * 100 + '", "input": "a"}', "a"),
    ],
)
def test_a_custom_input_in_another_form(arguments: str, text: str) -> None:
    reader = CustomInput()
    assert "".join([*(reader.push(one) for one in arguments), reader.finish()]) == text


def output(*, tells_reasoning: bool = True) -> ResponseOutput:
    tools = {"patch": CalledTool("patch", is_custom=True), "s__f": CalledTool("f", "s")}
    return ResponseOutput(
        lambda name: tools.get(name, CalledTool(name)), tells_reasoning=tells_reasoning
    )


PIECES = [
    OutputPiece(reasoning="Hm"),
    OutputPiece(reasoning="."),
    OutputPiece(content="\n"),
    OutputPiece(content="I "),
    OutputPiece(content="look."),
    OutputPiece(call=0, name="s__f", call_id="c0"),
    OutputPiece(call=0, arguments='{"a":'),
    OutputPiece(call=0, arguments="1}"),
    OutputPiece(content="\n"),
    OutputPiece(call=1, name="patch", call_id="c1"),
    OutputPiece(call=1, arguments='{"input": "x'),
    OutputPiece(call=1, arguments='\\n"}'),
]


def test_items_and_their_events_in_order() -> None:
    written = output()
    told = [*written.take(PIECES), *written.finish("completed")]
    kinds = [kind.removeprefix("response.") for kind, _ in told]
    words = ["content_part.done", "output_item.done"]
    assert kinds == [
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *words),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", *words),
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        *("function_call_arguments.done", "output_item.done"),
        "output_item.added",
        *["custom_tool_call_input.delta"] * 2,
        *("custom_tool_call_input.done", "output_item.done"),
    ]
    members = [json.loads(f"{{{one}}}") for _, one in told]
    items = json.loads(written.items)
    done = [one["item"] for one in members if one.get("item", {}).get("status") == "completed"]
    assert done == items
    for number, item in enumerate(items):
        mine = [one for one in members if one["output_index"] == number]
        assert {one.get("item_id", item["id"]) for one in mine} == {item["id"]}
        assert mine[0]["item"]["status"] == "in_progress"
    reasoning, message, call, patch = items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [one["text"] for one in message["content"]] == ["\nI look."]
    told_call = {"call_id": "c0", "name": "f", "namespace": "s", "arguments": '{"a":1}'}
    assert call.items() >= told_call.items()
    assert patch.items() >= {"type": "custom_tool_call", "name": "patch", "input": "x\n"}.items()


def test_an_output_that_is_cut_or_empty() -> None:
    for pieces, status, texts in [
        ([], "completed", [""]),
        ([OutputPiece(content=" \n")], "completed", [" \n"]),
        ([OutputPiece(content="a")], "incomplete", ["a"]),
    ]:
        written = output()
        written.take(pieces)
        told = written.finish(status)
        assert told[-1][0] == "response.output_item.done"
        [item] = json.loads(written.items)
        assert item["status"] == status
        assert [one["text"] for one in item["content"]] == texts


@pytest.mark.parametrize(
    "brought",
    [
        {"metadata": {"a": "x" * 300_000}},
        {"instructions": "x" * 300_000},
        {"text": {"format": {"type": "json_schema", "schema": {"title": "x" * 300_000}}}},
    ],
)
def test_a_long_call_is_not_repeated_in_its_response(brought: Any) -> None:
    names: Any = None
    reply = ResponsesReply(read(**brought), Shown(names), "m")
    events = reply.error_event(internal_error())
    assert events.startswith(b"event: response.created\n")
    assert len(events) < 10_000


def test_what_is_left_out_is_counted_by_not_too_many_names() -> None:
    counted = RouterMetrics("m")
    left_out = LeftOut(counted)
    left_out.note("/x", [f"tools.{number}" for number in range(1000)])
    left_out.note("/x", ["tools.0", "tools.0", "tools.999"])
    lines = generate_latest(counted.registry).decode().splitlines()
    told = [one.rpartition(" ") for one in lines if one.startswith("kvrelay_http_left_out_total{")]
    numbers = {line.partition('what="')[2][:-2]: float(value) for line, _, value in told}
    assert len(numbers) == 257
    assert (numbers["tools.0"], numbers["other"], sum(numbers.values())) == (3, 745, 1003)


def test_reasoning_that_is_not_wanted() -> None:
    written = output(tells_reasoning=False)
    written.take(PIECES)
    written.finish("completed")
    kinds = [one["type"] for one in json.loads(written.items)]
    assert kinds == ["message", "function_call", "custom_tool_call"]
