"""The JSON bodies of the HTTP door's calls: their members, with the names and types of each.

A value's legal range is checked for every door in `router.admission`. Here only values are refused
that JSON allows and the router's messages cannot hold, and those that are not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, TypeAdapter, create_model

from kvrelay.router.doors.http.field_types import (
    AsSent,
    Expected,
    Float32,
    HistoryDigest,
    Int32,
    JsonSchema,
    LogitBias,
    Object,
    Only,
    PositiveInt32,
    Prompts,
    Seed,
    Strings,
    TokenIds,
    UInt32,
)
from kvrelay.router.doors.http.json_body import OpenObject, RequestBody
from kvrelay.router.doors.http.messages.message_bodies import CountTokensRequest, MessagesRequest
from kvrelay.router.doors.http.responses.response_bodies import ResponsesRequest
from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.v1 import inference_pb2
from kvrelay.wire.sampling_limits import LIMITS

MAX_TOOLS: Final = 128
TOOL_NAME: Final = "[A-Za-z0-9_.-]{1,128}"
"""A tool's name, as a regular expression."""
_OWN_TYPES: Final = ("max_tokens", "logprobs", "prompt_logprobs", "top_k")
"""The parameters of the table that have other names here, or other values."""
_TYPES: Final = {float: Float32, int: UInt32, bool: bool}


if TYPE_CHECKING:
    _SimpleParameters = RequestBody
else:
    _SimpleParameters = create_model(
        "_SimpleParameters",
        __base__=RequestBody,
        **{
            name: (_TYPES[limits.kind] | None, None)
            for name, limits in LIMITS.items()
            if name not in _OWN_TYPES
        },
    )


class SamplingFields(_SimpleParameters):
    """The sampling parameters that have the same names in the router's own message.

    Those that are one number or one flag come from the table of their legal values.
    """

    max_tokens: UInt32 | None = None
    top_k: Int32 | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    stop: Strings | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None

    def sampling_params(self) -> inference_pb2.SamplingParams:
        """Return the parameters as the router's own message, where None leaves a field unset."""
        return inference_pb2.SamplingParams(
            **{name: getattr(self, name) for name in SamplingFields.__pydantic_fields__}
        )


class StreamOptions(RequestBody):
    """The usage that a stream has."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class JsonSchemaResponseFormat(RequestBody):
    """The schema of an output, with what OpenAI has beside it."""

    json_schema: JsonSchema = Field(alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(RequestBody):
    """The form of an output, as OpenAI has it."""

    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"],
        Expected('must be "text", "json_object", "json_schema" or "structural_tag"'),
    ]
    json_schema: JsonSchemaResponseFormat | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None
    json_object_schema: JsonSchema | None = Field(None, alias="schema")


class StructuredOutputsParams(RequestBody):
    """The form of an output, as vLLM has it."""

    json_schema: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Strings | None = None
    json_object: bool | None = None
    structural_tag: JsonSchema | None = None


class CacheControl(OpenObject):
    """How long a prompt's KV is of use, as Anthropic and Dynamo have it."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,4}[smh]$")] = "5m"

    @property
    def seconds(self) -> int:
        """The time in seconds."""
        return int(self.ttl[:-1]) * {"s": 1, "m": 60, "h": 3600}[self.ttl[-1]]


class GenerationFields(SamplingFields):
    """The members that the bodies of both endpoints for generation have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: UInt32 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Strings | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    retain_seconds: Float32 | None = None
    cache_control: CacheControl | None = None
    prompt_cache_retention: Any = None
    """Only "24h" has a meaning."""
    session_id: Any = None
    """An open session's id; clients of other servers send what they like."""

    # SGLang's names.
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    no_stop_trim: bool | None = None

    # Without meaning for this server.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None
    guided_decoding_backend: Any = None
    request_id: Any = None
    store: Any = None
    verbosity: Any = None

    # Served with the values alone at which they have no effect.
    length_penalty: Annotated[Any, Only(1)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    use_beam_search: Annotated[Any, Only(False)] = None


def retain_seconds_of(body: GenerationFields) -> float | None:
    """How long the call's KV is to be retained; the first of its fields that says so counts."""
    if body.retain_seconds is not None:
        return body.retain_seconds
    if body.cache_control is not None:
        return body.cache_control.seconds
    return 24 * 3600 if body.prompt_cache_retention == "24h" else None


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    prompt: Prompts
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None
    best_of: PositiveInt32 | None = None
    suffix: Annotated[Any, Only("")] = None


class TextPart(OpenObject):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class RefusalPart(OpenObject):
    """A part of an earlier answer in which the model refused."""

    type: Literal["refusal"]
    refusal: str


def _read_part(given: Any) -> str:
    """Return a part's text. No model is made, which takes ten times as long."""
    text = given
    if isinstance(given, dict):
        name = _TEXTS_OF_PARTS.get(given.get("type", "text"))
        text = given.get(name) if name else None
    if not isinstance(text, str):
        raise ValueError('must be a text: {"type": "text", "text": …}')
    return text


_TEXTS_OF_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""The member that has the text, for each type of a part."""
_Part = Annotated[
    str, PlainValidator(_read_part, json_schema_input_type=str | TextPart | RefusalPart)
]
_PARTS: Final = TypeAdapter[list[str]](Annotated[list[_Part], Field(fail_fast=True)])


def _join_parts(given: Any) -> str:
    """Return the text of a content, which may come in parts; each becomes a line."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise ValueError("must be a text, or a list of parts")
    return "\n".join(_PARTS.validate_python(given))


_Content = Annotated[
    str, PlainValidator(_join_parts, json_schema_input_type=str | list[_Part] | None)
]


class CallArguments(dict[str, Any]):
    """The arguments of an earlier call: an object to a template, or JSON where it makes text of it.

    Templates of some models expect the one, and those of others the other.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def _parse_arguments(given: Any) -> Any:
    """Return the arguments of a call as the object that templates expect, or as they came.

    A call that was cut off, or that a model has written wrong, stays in its conversation.
    """
    if given is None or given == "":
        return CallArguments()
    if not isinstance(given, str | dict):
        raise ValueError("must be a text, or an object")
    if isinstance(given, dict):
        return CallArguments(given)
    if not is_json(given):
        return given
    read = json.loads(given)
    return CallArguments(read or {}) if read is None or isinstance(read, dict) else given


_Arguments = Annotated[
    Any, PlainValidator(_parse_arguments, json_schema_input_type=str | Object | None)
]


class FunctionCall(OpenObject):
    """The function of a call of an earlier turn, and its arguments."""

    arguments: _Arguments = Field(default_factory=CallArguments)


class MessageToolCall(OpenObject):
    """A call of an earlier turn."""

    function: Annotated[Object, AsSent(FunctionCall)]


_ToolCalls = Annotated[list[Annotated[Object, AsSent(MessageToolCall)]], Field(fail_fast=True)]


class ChatMessage(OpenObject):
    """A message of a conversation; its other members are for the template."""

    role: str
    content: _Content = ""
    tool_calls: _ToolCalls | None = None


class FunctionDefinition(OpenObject):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
    parameters: Object | None = None


class ChatCompletionToolsParam(OpenObject):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[Object, AsSent(FunctionDefinition)]


class NamedFunction(OpenObject):
    """The name of a function that the model must call."""

    name: str


class ChatCompletionNamedToolChoiceParam(OpenObject):
    """The choice of a function that the model must call."""

    function: NamedFunction


_ToolChoice = Annotated[
    Literal["auto", "none", "required"] | ChatCompletionNamedToolChoiceParam,
    Expected('must be "auto", "none", "required" or a function'),
]
_Messages = Annotated[
    list[Annotated[Object, AsSent(ChatMessage)]], Field(min_length=1, fail_fast=True)
]
_Tools = Annotated[
    list[Annotated[Object, AsSent(ChatCompletionToolsParam)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class ChatFields(RequestBody):
    """A conversation, and how it becomes a prompt."""

    messages: _Messages
    tools: _Tools | None = None
    chat_template: Annotated[Any, Only()] = None
    chat_template_kwargs: Object | None = None
    chat_template_args: Object | None = None
    enable_thinking: bool | None = None
    documents: Annotated[Any, Only([])] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(ChatFields, GenerationFields):
    """The body of /v1/chat/completions."""

    max_completion_tokens: UInt32 | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking_budget: UInt32 | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    modalities: Annotated[Any, Only(["text"])] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    best_of: Annotated[Any, Only(1)] = None
    echo: Annotated[Any, Only(False)] = None


class SessionRequest(RequestBody):
    """The body of POST /v1/sessions."""

    session_id: str | None = None
    idle_timeout_seconds: float | None = None
    max_kept_tokens: UInt32 | None = None
    history: TokenIds | None = None
    history_digest: HistoryDigest | None = None


class TokenizeCompletionRequest(RequestBody):
    """The body of /tokenize with a text."""

    prompt: str
    model: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeChatRequest(ChatFields):
    """The body of /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    tokens: TokenIds
    model: str | None = None
    skip_special_tokens: bool | None = None


BODIES: Final[Mapping[str, Any]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/sessions": SessionRequest,
    "/tokenize": TokenizeCompletionRequest | TokenizeChatRequest,
    "/detokenize": DetokenizeRequest,
}
"""The body of POST for each path that takes one: a model, or a union of models."""
