"""The tools of a chat: what the model is told of them, and how it may, or must, call them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvrelay.router.admission.prompt_input import BegunReasoning
from kvrelay.router.config import ReasoningFormat, RouterConfig, ToolParser
from kvrelay.router.doors.http.chat_prompt import ChatPrompt
from kvrelay.router.doors.http.protocol import ChatCompletionRequest
from kvrelay.router.errors import InvalidField
from kvrelay.router.requests.live_limits import FIELD
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.grammar import MAX_GRAMMAR_BYTES
from kvrelay.text.json_schema import refer_below, without_annotations
from kvrelay.text.output_parsers.call_grammar import CallGrammar, NoGrammarError
from kvrelay.text.output_parsers.formats import TOOL_FORMATS, form_or_calls, format_of
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.pieces import MakeParser, OutputParser
from kvrelay.text.output_parsers.plain import (
    CallsAloneParser,
    ContentParser,
    FirstCallParser,
    NamedCallParser,
)
from kvrelay.text.output_parsers.reasoning import ReasoningParser
from kvrelay.text.output_parsers.reasoning_tags import (
    REASONING_TAGS,
    ReasoningTags,
    reasoning_tags_of,
)
from kvrelay.text.output_parsers.tool_format import ToolFormat
from kvrelay.text.output_parsers.tool_formats.harmony import (
    HARMONY,
    HarmonyParser,
    harmony_reasoning,
)
from kvrelay.text.output_parsers.tool_formats.llama3_json import json_calls_parser
from kvrelay.text.token_texts import TokenTexts
from kvrelay.v1 import inference_pb2

_COMBINING: Final = {"$ref", "allOf", "anyOf", "oneOf"}
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}}
"""The parameters of a function that names none."""
_ANY_ARGUMENTS: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The served model's conventions for conversations, tool calls and reasoning."""

    template: ChatTemplate | None
    """The chat template; None: the model has none."""
    tools: ToolFormat | None
    """The format of tool calls; None: it is unknown."""
    calls_are_parsed: bool
    reasoning: ReasoningTags | None
    """The tags of the reasoning that its output may begin with; None: it has none."""
    channels: MakeParser | None = None
    """A function that makes a parser of outputs in harmony's channels; None: it has none."""

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None) -> Dialect:
        """Choose the dialect that the options name, or that the template shows."""
        source = template.source if template is not None else ""
        wanted, reasoning = config.tool_call_parser, config.reasoning_parser
        is_shown = wanted is ToolParser.AUTO
        tools = format_of(source) if is_shown else TOOL_FORMATS.get(wanted.value)
        if is_shown and reasoning is ReasoningFormat.OPENAI_GPTOSS:
            tools = HARMONY
        is_shown = reasoning is ReasoningFormat.AUTO
        tags = reasoning_tags_of(source) if is_shown else REASONING_TAGS.get(reasoning.value)
        tells_calls = wanted is not ToolParser.NONE
        tells_reasoning = reasoning is not ReasoningFormat.NONE
        names_channels = reasoning is ReasoningFormat.OPENAI_GPTOSS
        shows_channels = is_shown and HARMONY.shown_by(source)
        has_channels = tools is HARMONY or (tools is None and (names_channels or shows_channels))
        channels = functools.partial(
            _channels, tells_calls=tells_calls, tells_reasoning=tells_reasoning
        )
        return cls(template, tools, tells_calls, tags, channels if has_channels else None)


def _channels(is_whole: bool, *, tells_calls: bool, tells_reasoning: bool) -> OutputParser:
    return HarmonyParser(
        is_whole=is_whole, tells_calls=tells_calls, tells_reasoning=tells_reasoning
    )


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
    in_own_format: bool = False
    """Whether a grammar holds calls to the model's own format and to their schemas."""
    beside_form: bool = False
    """Whether calls may come in place of a form."""
    schemas: Schemas = field(default_factory=dict)
    """The schemas of arguments by function."""

    @property
    def may_say_more(self) -> bool:
        """Whether an output that a grammar holds to calls may have other text, and reasoning."""
        return self.in_own_format and not (self.named or self.required)

    def parser(self, dialect: Dialect) -> MakeParser | None:
        """Return a function that makes a parser of tool calls; None: all output is content."""
        if self.named and not self.in_own_format:
            return lambda is_whole: NamedCallParser(self.named, is_whole=is_whole)
        if self.required and not self.in_own_format:
            return lambda is_whole: CallsAloneParser(json_calls_parser({}, is_whole))
        if dialect.channels is not None:
            make = dialect.channels
        elif dialect.tools is None or not self.shown:
            return None
        else:
            make = functools.partial(dialect.tools.parser, self.schemas)
        if self.named or self.required:
            return lambda is_whole: CallsAloneParser(make(is_whole))
        if self.first_alone:
            return lambda is_whole: FirstCallParser(make(is_whole))
        return make


def speaker(
    tools: Tools, dialect: Dialect, prompt: ChatPrompt, *, has_form: bool, separates: bool
) -> MakeParser | None:
    """Return a function that makes a parser of an output; None: all of it is content.

    Args:
        tools: the call's tools.
        dialect: the model's dialect.
        prompt: the prompt, which is rendered before a parser is made.
        has_form: whether the output has a structured form, behind its reasoning.
        separates: whether reasoning is told apart from content.
    """
    make = tools.parser(dialect)
    tags = dialect.reasoning
    is_told = separates or tools.named or tools.required
    if tags is None or not is_told or dialect.channels is not None:
        return make
    if has_form and not tools.in_own_format:
        tags = dataclasses.replace(tags, ends_before="")

    def make_speaker(is_whole: bool) -> OutputParser:
        rest = make(is_whole) if make is not None else ContentParser()
        if has_form and prompt.reasoning is BegunReasoning.OVER:
            return rest
        return ReasoningParser(
            rest,
            begins_inside=prompt.reasoning is BegunReasoning.BEGUN,
            skips_space=not prompt.ends_in_words,
            form=tags,
        )

    return make_speaker


def set_reasoning(params: inference_pb2.SamplingParams, dialect: Dialect, tools: Tools) -> None:
    """Say where reasoning ends, if a form, a budget or stop strings depend on it.

    Without reasoning, a budget says nothing and is left out.

    Args:
        params: the parameters, which are changed.
        dialect: the model's dialect.
        tools: the call's tools.
    """
    has_form = params.HasField(FIELD)
    tags = dialect.reasoning
    if dialect.channels is not None:
        has_calls = tools.in_own_format or tools.beside_form
        is_plain_call = has_form and not has_calls and (tools.required or bool(tools.named))
        tags = harmony_reasoning(has_form=has_form, has_calls=has_calls)
        tags = None if is_plain_call else tags  # it has no header that ends the reasoning
    if tags is None:
        params.ClearField("thinking_token_budget")
        return
    if not (has_form or params.stop or params.HasField("thinking_token_budget")):
        return
    ends_before = tags.ends_before if tools.in_own_format or not has_form else ""
    params.reasoning.CopyFrom(
        inference_pb2.Reasoning(
            begun=not tags.opens,
            begins=tags.opens,
            ends=tags.closes,
            ends_before=[ends_before] if ends_before else (),
            forced_end=tags.forced_end,
        )
    )


def read_tools(
    body: ChatCompletionRequest,
    dialect: Dialect,
    params: inference_pb2.SamplingParams,
    tokens: TokenTexts,
) -> Tools:
    """Convert `tools` and `tool_choice`; set the fields of `params` that calls need.

    If a call is required, its form becomes the structured output. If calls are allowed beside a
    `response_format`, the output is either. Otherwise the tags of calls are left in the text.

    Args:
        body: the body.
        dialect: the model's dialect.
        params: the parameters, which are changed.
        tokens: the vocabulary.
    """
    tools, choice = body.tools or [], body.tool_choice or "auto"
    has_tags = _has_tags(dialect, tokens, may_call=bool(tools) and choice == "auto")
    if has_tags and not params.HasField("skip_special_tokens"):
        params.skip_special_tokens = False
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
        beside_form = body.response_format is not None and body.response_format.type != "text"
        if beside_form:
            beside_form = _allow_calls_beside_form(functions, dialect, params, tokens)
        first_alone = body.parallel_tool_calls is False
        return Tools(
            tools,
            first_alone=first_alone,
            in_own_format=_hold_strict_calls(
                functions, dialect, params, 1 if first_alone else None, tokens
            ),
            beside_form=beside_form,
            schemas={name: one.get("parameters") or {} for name, one in functions.items()},
        )
    if params.HasField(FIELD):
        raise InvalidField("tool_choice", "is not allowed with another structured output")
    name = "" if choice == "required" else choice.function.name
    if name and name not in functions:
        what = f"{json.dumps(name[:64])} is no tool of this call"
        raise InvalidField("tool_choice.function.name", what)
    wanted = {name: functions[name]} if name else functions
    schemas = {one: arguments_of(function) for one, function in wanted.items()}
    most = 1 if name or body.parallel_tool_calls is False else None
    grammar = _own_grammar(dialect, schemas, most, tokens)
    if grammar is not None:
        params.structured_output.grammar = grammar
        params.skip_special_tokens = False
    elif name:
        params.structured_output.json_schema = json.dumps(schemas[name], ensure_ascii=False)
    else:
        params.structured_output.json_schema = calls_schema(schemas, most)
    in_own_format = grammar is not None
    return Tools(tools, named=name, required=not name, in_own_format=in_own_format, schemas=schemas)


def _has_tags(dialect: Dialect, tokens: TokenTexts, *, may_call: bool) -> bool:
    """Return whether tags must stay in an output, which are special in some vocabularies."""
    tags = dialect.reasoning
    if dialect.channels is not None or (dialect.tools is not None and may_call):
        return True
    return tags is not None and bool(tokens.special_ids.keys() & {*tags.opens, *tags.closes})


def _hold_strict_calls(
    functions: Mapping[str, Mapping[str, Any]],
    dialect: Dialect,
    params: inference_pb2.SamplingParams,
    most: int | None,
    tokens: TokenTexts,
) -> bool:
    """Hold calls of strict tools to their schemas, if there are any; return whether they are.

    Calls of other tools have any arguments.
    """
    if not any(map(_is_strict, functions.values())) or params.HasField(FIELD):
        return False
    grammar = _own_grammar(dialect, _held_schemas(functions), most, tokens, in_text=True)
    if grammar is not None:
        params.structured_output.grammar = grammar
    return grammar is not None


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def _held_schemas(functions: Mapping[str, Mapping[str, Any]]) -> Schemas:
    """Return the schemas that calls are held to: of tools that are not strict any arguments."""
    return {
        name: arguments_of(one) if _is_strict(one) else _ANY_ARGUMENTS
        for name, one in functions.items()
    }


def _allow_calls_beside_form(
    functions: Mapping[str, Mapping[str, Any]],
    dialect: Dialect,
    params: inference_pb2.SamplingParams,
    tokens: TokenTexts,
) -> bool:
    """Let calls come in place of a form, if there is one and the format can tell them."""
    form = params.structured_output.json_schema if params.HasField(FIELD) else ""
    if not form or dialect.tools is None:
        return False
    either = form_or_calls(form, dialect.tools, _held_schemas(functions), tokens.unspelled_ids)
    if either is None or len(either.encode()) > MAX_GRAMMAR_BYTES:
        return False
    params.structured_output.CopyFrom(inference_pb2.StructuredOutput(grammar=either))
    return True


def _own_grammar(
    dialect: Dialect,
    schemas: Schemas,
    most: int | None,
    tokens: TokenTexts,
    *,
    in_text: bool = False,
) -> str | None:
    """Return the grammar of calls in the model's own format; None: it cannot tell the schemas.

    Args:
        dialect: the model's dialect.
        schemas: the schemas of arguments by function.
        most: the most calls; None: any number.
        tokens: the vocabulary.
        in_text: whether calls may come, in other text.
    """
    form = dialect.tools
    if form is None:
        return None
    grammar = CallGrammar(schemas, most, tokens.unspelled_ids)
    try:
        calls = None if in_text else form.grammar(grammar)
        written = form.grammar_in_text(grammar) if calls is None else grammar.lark(calls)
    except NoGrammarError:
        return None
    is_short = written is not None and len(written.encode()) <= MAX_GRAMMAR_BYTES
    return written if is_short else None


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


def calls_schema(schemas: Mapping[str, dict[str, Any]], most: int | None) -> str:
    """Return the schema of a list of calls, in JSON.

    Each function's arguments are a definition of their own, with references that lead into it.
    """
    definitions, calls = {}, []
    for number, (name, arguments) in enumerate(schemas.items()):
        place = f"/$defs/{number}"
        definitions[str(number)] = arguments
        refer_below(arguments, place)
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


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
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
