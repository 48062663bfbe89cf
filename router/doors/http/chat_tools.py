"""The tools of a chat: what the model is told of them, and how it may, or must, call them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvrelay.router.config import ReasoningFormat, RouterConfig, ToolParser
from kvrelay.router.doors.http.chat_prompt import ChatPrompt
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.router.errors import InvalidField
from kvrelay.router.requests.live_limits import FIELD
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.json_schema import refer_below, without_annotations
from kvrelay.text.output_parsers.formats import ToolFormat, form_or_calls, format_of
from kvrelay.text.output_parsers.hermes import HermesParser
from kvrelay.text.output_parsers.llama3_json import JsonCallsParser
from kvrelay.text.output_parsers.pieces import MakeParser, OutputParser
from kvrelay.text.output_parsers.plain import (
    CallsAloneParser,
    ContentParser,
    FirstCallParser,
    NamedCallParser,
)
from kvrelay.text.output_parsers.pythonic import PythonicParser
from kvrelay.text.output_parsers.reasoning import ReasoningParser
from kvrelay.v1 import inference_pb2

_PARSERS: Final[Mapping[ToolFormat, MakeParser]] = {
    ToolFormat.HERMES: lambda is_whole: HermesParser(is_whole=is_whole),
    ToolFormat.LLAMA3_JSON: lambda is_whole: JsonCallsParser(is_whole=is_whole),
    ToolFormat.PYTHONIC: lambda _: PythonicParser(),
}
_COMBINING: Final = {"$ref", "allOf", "anyOf", "oneOf"}
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}}
"""The parameters of a function that names none."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The served model's conventions for conversations, tool calls and reasoning."""

    template: ChatTemplate | None
    """The chat template; None: the model has none."""
    tools: ToolFormat | None
    """The format of tool calls; None: it is unknown."""
    calls_are_parsed: bool
    reasons: bool
    """Whether its output may begin with reasoning."""

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None) -> Dialect:
        """Choose the dialect that the options name, or that the template shows."""
        source = template.source if template is not None else ""
        wanted, reasoning = config.tool_call_parser, config.reasoning_parser
        if wanted is ToolParser.AUTO:
            tools = format_of(source)
        else:
            tools = None if wanted is ToolParser.NONE else ToolFormat(wanted.value)
        reasons = reasoning is ReasoningFormat.THINK
        if reasoning is ReasoningFormat.AUTO:
            reasons = ReasoningParser.OPEN in source
        return cls(template, tools, wanted is not ToolParser.NONE, reasons)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one call."""

    shown: Sequence[Mapping[str, Any]] | None = None
    """The tools that the template is given; None: none."""
    named: str = ""
    """The tool that must be called; empty: no particular one."""
    required: bool = False
    """Whether at least one tool must be called."""
    first_alone: bool = False
    """Whether only the first of the model's calls counts."""

    def parser(self, dialect: Dialect) -> MakeParser | None:
        """Return a function that makes a parser of tool calls; None: all output is content."""
        if self.named:
            return lambda is_whole: NamedCallParser(self.named, is_whole=is_whole)
        if self.required:
            return lambda is_whole: CallsAloneParser(JsonCallsParser(is_whole=is_whole))
        if not self.shown or dialect.tools is None:
            return None
        make = _PARSERS[dialect.tools]
        if self.first_alone:
            return lambda is_whole: FirstCallParser(make(is_whole))
        return make


def speaker(
    tools: Tools, dialect: Dialect, prompt: ChatPrompt, *, has_form: bool
) -> MakeParser | None:
    """Return a function that makes a parser of an output; None: all of it is content.

    An output with a structured form has no reasoning, even if its prompt ends in reasoning.

    Args:
        tools: the call's tools.
        dialect: the model's dialect.
        prompt: the prompt, which is rendered before a parser is made.
        has_form: whether the output has a structured form.
    """
    make = tools.parser(dialect)
    if not dialect.reasons or has_form:
        return make

    def make_speaker(is_whole: bool) -> OutputParser:
        return ReasoningParser(
            make(is_whole) if make is not None else ContentParser(),
            begins_inside=prompt.ends_in_reasoning,
            skips_space=not prompt.ends_in_words,
        )

    return make_speaker


def read_tools(
    body: ChatCompletionRequest,
    dialect: Dialect,
    params: inference_pb2.SamplingParams,
    special_tokens: Collection[str],
) -> Tools:
    """Convert `tools` and `tool_choice`; set the fields of `params` that calls need.

    If a call is required, its form becomes the structured output. If calls are allowed beside a
    `response_format`, the output is either. Otherwise the tags of calls are left in the text.
    """
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools:
        if choice not in ("auto", "none"):
            raise InvalidField("tool_choice", "is allowed with tools alone")
        return Tools()
    functions = _by_name(tools)
    if choice == "none":
        return Tools()
    if choice == "auto":
        if dialect.calls_are_parsed and dialect.tools is None:
            raise InvalidField(
                "tools",
                "the chat template shows none, or in a form that is not known here: "
                "--tool-call-parser names the form, and tool_choice can require a call",
            )
        if dialect.tools is not None and not params.HasField("skip_special_tokens"):
            params.skip_special_tokens = False  # the tags around calls are, in some vocabularies
        form = params.structured_output.json_schema if params.HasField(FIELD) else ""
        if form and dialect.tools is not None and body.response_format is not None:
            either = form_or_calls(form, dialect.tools, functions, special_tokens)
            params.structured_output.CopyFrom(inference_pb2.StructuredOutput(grammar=either))
        return Tools(tools, first_alone=body.parallel_tool_calls is False)
    if params.HasField(FIELD):
        raise InvalidField("tool_choice", "is not allowed with another structured output")
    if choice == "required":
        most = 1 if body.parallel_tool_calls is False else None
        params.structured_output.json_schema = calls_schema(functions, most)
        return Tools(tools, required=True)
    name = choice.function.name
    if name not in functions:
        what = f"{json.dumps(name[:64])} is no tool of this call"
        raise InvalidField("tool_choice.function.name", what)
    arguments = _arguments(functions[name])
    params.structured_output.json_schema = json.dumps(arguments, ensure_ascii=False)
    return Tools(tools, named=name)


def _by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the functions by name; raise `InvalidField` if one cannot be called."""
    functions = {one["function"]["name"]: one["function"] for one in tools}
    if len(functions) < len(tools):
        raise InvalidField("tools", "must have different names")
    for number, function in enumerate(functions.values()):
        if not _are_members((function.get("parameters") or {}).get("type", "object")):
            place = f"tools[{number}].function.parameters.type"
            raise InvalidField(place, "must be object: a call has its arguments by name")
    return functions


def calls_schema(functions: Mapping[str, Mapping[str, Any]], most: int | None) -> str:
    """Return the schema of a list of calls, in JSON.

    Each function's parameters are a definition of their own, with references that lead into it.
    """
    definitions, calls = {}, []
    for number, (name, function) in enumerate(functions.items()):
        place = f"/$defs/{number}"
        definitions[str(number)] = arguments = _arguments(function)
        try:
            refer_below(arguments, place)
        except ValueError as error:
            what = f"{error}: where a call is required, use $defs and references into it"
            raise InvalidField(f"tools[{number}].function.parameters", what) from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#{place}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    bounds = {"minItems": 1} if most is None else {"minItems": 1, "maxItems": most}
    schema = {"$defs": definitions, "type": "array", "items": {"anyOf": calls}, **bounds}
    return json.dumps(schema, ensure_ascii=False)


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, an object, without words for the model."""
    try:
        schema = without_annotations(function.get("parameters") or _NO_ARGUMENTS)
    except RecursionError:
        raise InvalidField("tools", "have parameters that are nested too deeply") from None
    if not _COMBINING & schema.keys():
        schema["type"] = "object"
    return schema


def _are_members(types: Any) -> bool:
    """Return whether the type of parameters allows an object."""
    return types == "object" or (isinstance(types, list) and "object" in types)
