"""The formats in which models write tool calls, and how a chat template shows which one it is."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import StrEnum
from typing import Any, Final


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


_PYTHON_CALLS: Final = r"""
calls: "[" call ("," " "? call)* "]"
call: NAME "(" (argument ("," " "? argument)*)? ")"
argument: /[A-Za-z_][A-Za-z0-9_]*/ "=" value
value: TEXT | /-?[0-9]{1,15}(\.[0-9]{1,15})?/ | "True" | "False" | "None" | list | dict
list: "[" (value ("," " "? value)*)? "]"
dict: "{" (member ("," " "? member)*)? "}"
member: TEXT ":" " "? value
TEXT: /"([^"\\\x00-\x1f]|\\["\\n])*"|'([^'\\\x00-\x1f]|\\['\\n])*'/
"""


def form_or_calls(
    form: str, tools: ToolFormat, names: Collection[str], special: Collection[str]
) -> str:
    """The grammar, in Lark's form, of an output that is JSON of a form, or calls of functions.

    Arguments of calls are free, as they are without a form.

    Args:
        form: the form's schema, in JSON.
        tools: the format of calls.
        names: the functions' names.
        special: the vocabulary's special tokens, which no text stands for.
    """
    start = f"start: form | calls\nform: %json {form}\n"
    if tools is ToolFormat.PYTHONIC:
        return f"{start}NAME: {' | '.join(map(json.dumps, names))}\n{_PYTHON_CALLS.lstrip()}"
    arguments = "arguments" if tools is ToolFormat.HERMES else "parameters"
    call: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"enum": list(names)}, arguments: {"type": "object"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }
    object_ = f"object: %json {json.dumps(call)}\n"
    if tools is ToolFormat.LLAMA3_JSON:
        return f'{start}calls: object ("; " object)*\n{object_}'
    opens, closes = (
        tag if tag in special else json.dumps(tag) for tag in ("<tool_call>", "</tool_call>")
    )
    call_ = f'call: {opens} "\\n"? object "\\n"? {closes}\n'
    return f'{start}calls: call ("\\n"? call)*\n{call_}{object_}'
