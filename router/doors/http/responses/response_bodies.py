"""The JSON body of /v1/responses: its members, with the names and types of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from kvrelay.router.doors.http.field_types import Expected, Float32, Object, Only, UInt32
from kvrelay.router.doors.http.json_body import OpenObject


class ReasoningOptions(OpenObject):
    """The reasoning that is wanted; there are no summaries."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class TextFormat(OpenObject):
    """The form of the output's text."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Expected('must be "text", "json_object" or "json_schema"'),
    ]


class TextOptions(OpenObject):
    """The text that is wanted."""

    format: Object | None = None
    verbosity: Any = None


_ToolChoice = Annotated[
    Literal["auto", "none", "required"] | Object,
    Expected('must be "auto", "none", "required" or an object'),
]


class ResponsesRequest(OpenObject):
    """The body of /v1/responses; what a chat alone has a word for is a member, too."""

    input: Annotated[str | list[Any], Expected("must be a text, or a list of items")]
    model: str | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: UInt32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    metadata: Object | None = None
    stream: bool | None = None

    # Only without a memory of earlier calls.
    store: Annotated[Any, Only(False)] = None
    background: Annotated[Any, Only(False)] = None
    previous_response_id: Annotated[Any, Only()] = None
    conversation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None

    # Without meaning for this server.
    include: Any = None
    stream_options: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    truncation: Any = None
    client_metadata: Any = None
