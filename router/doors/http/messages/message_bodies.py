"""The JSON bodies of /v1/messages and its like, as Anthropic's API has them.

A member without a meaning here is left out, as agents send what only their vendor serves. Blocks
of contents are read where they are translated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvrelay.router.doors.http.field_types import Expected, Float32, Int32, Object, UInt32
from kvrelay.router.doors.http.json_body import OpenObject

Blocks = Annotated[
    str | Annotated[list[Object], Field(fail_fast=True)],
    Expected("must be a text, or a list of blocks"),
]
"""A content: a text, or a list of blocks."""


class MessageParam(OpenObject):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolParam(OpenObject):
    """A tool: the client's own, or one that the vendor knows by its type."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Object | None = None
    strict: bool | None = None


class ToolChoice(OpenObject):
    """The choice of tools that the model may, or must, call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(OpenObject):
    """Whether the model thinks before it answers, and whether that is shown."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: UInt32 | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(OpenObject):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    json_schema: Object = Field(alias="schema")


class OutputConfig(OpenObject):
    """The effort of the answer, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(OpenObject):
    """The body of /v1/messages/count_tokens: a conversation, and what changes its prompt."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: Object | None = None

    cache_control: Any = None

    # Without meaning for this server.
    metadata: Any = None
    service_tier: Any = None


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: UInt32
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: Int32 | None = None

    # This server's own, as in chats.
    cache_salt: Any = None
    priority: Any = None
    seed: Any = None
    session_id: Any = None
