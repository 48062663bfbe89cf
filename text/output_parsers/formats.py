"""The formats in which models write tool calls, and how a chat template shows which one it is."""

from __future__ import annotations

from enum import StrEnum


class ToolFormat(StrEnum):
    """The format in which a model writes calls."""

    HERMES = "hermes"
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen do."""
    LLAMA3_JSON = "llama3_json"
    """``{"name": …, "parameters": {…}}``, and nothing else."""
    PYTHONIC = "pythonic"
    """``[name(argument=value)]``, and nothing else."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template tells the model to use; None if it names no known one."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat.HERMES if '"arguments"' in template else None
    if "func_name1(" in template:
        return ToolFormat.PYTHONIC
    if '"parameters"' in template:
        return ToolFormat.LLAMA3_JSON
    return None
