"""The formats in which models write tool calls, and how a chat template shows which one it is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Final

from kvrelay.text.output_parsers.call_grammar import CallGrammar, NoGrammarError
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.pythonic import KEYWORDS, is_name
from kvrelay.text.output_parsers.tool_format import ToolFormat
from kvrelay.text.output_parsers.tool_formats.deepseek_v3 import DEEPSEEK_V3
from kvrelay.text.output_parsers.tool_formats.deepseek_v31 import DEEPSEEK_V31
from kvrelay.text.output_parsers.tool_formats.deepseek_v32 import DEEPSEEK_V4, DEEPSEEK_V32
from kvrelay.text.output_parsers.tool_formats.glm import GLM45, GLM47
from kvrelay.text.output_parsers.tool_formats.granite import GRANITE
from kvrelay.text.output_parsers.tool_formats.harmony import FINAL, HARMONY
from kvrelay.text.output_parsers.tool_formats.hermes import HERMES
from kvrelay.text.output_parsers.tool_formats.kimi_k2 import KIMI_K2
from kvrelay.text.output_parsers.tool_formats.llama3_json import LLAMA3_JSON
from kvrelay.text.output_parsers.tool_formats.llama4_pythonic import LLAMA4_PYTHONIC, PYTHONIC
from kvrelay.text.output_parsers.tool_formats.minimax_m2 import MINIMAX_M2
from kvrelay.text.output_parsers.tool_formats.mistral import MISTRAL, MISTRAL_LIST
from kvrelay.text.output_parsers.tool_formats.nemotron import NEMOTRON
from kvrelay.text.output_parsers.tool_formats.phi4_mini import PHI4_MINI
from kvrelay.text.output_parsers.tool_formats.qwen3_coder import QWEN3_CODER

_ALL: Final = (
    *(HARMONY, KIMI_K2, DEEPSEEK_V4, DEEPSEEK_V32, DEEPSEEK_V3, DEEPSEEK_V31),
    *(MISTRAL, MISTRAL_LIST, MINIMAX_M2, QWEN3_CODER, GLM47, GLM45),
    *(NEMOTRON, PHI4_MINI, GRANITE, LLAMA4_PYTHONIC, HERMES, PYTHONIC, LLAMA3_JSON),
)
"""All formats; of two that a template may show, the one that says more comes first."""
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {one.name: one for one in _ALL}
"""All formats by name."""


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template tells the model to use; None if it names no known one."""
    if "tools" not in template:
        return None
    return next((one for one in _ALL if one.shown_by(template)), None)


_PYTHON_CALLS: Final = rf"""
calls: "[" call ("," " "? call)* "]"
call: NAME "(" (argument ("," " "? argument)*)? ")"
argument: ARGUMENT "=" value
value: TEXT | /-?(0|[1-9][0-9]{{0,14}})(\.[0-9]{{1,15}})?/ | "True" | "False" | "None" | list | dict
list: "[" (value ("," " "? value)*)? "]"
dict: "{{" (member ("," " "? member)*)? "}}"
member: TEXT ":" " "? value
TEXT: /"([^"\\\x00-\x1f]|\\["\\n])*"|'([^'\\\x00-\x1f]|\\['\\n])*'/
ARGUMENT: /[A-Za-z_][A-Za-z0-9_]*/ & ~/{"|".join(KEYWORDS)}/
"""


_FORM: Final = "form: %json "


def form_or_calls(
    form: str, tools: ToolFormat, schemas: Schemas, special: Mapping[str, int]
) -> str | None:
    """The grammar, in Lark's form, of an output that is JSON of a form, or calls of functions.

    It is None if the format cannot tell the functions' schemas.

    Args:
        form: the form's schema, in JSON.
        tools: the format of calls.
        schemas: the schemas of the functions' arguments, to which calls without tags are not held.
        special: the ids of the vocabulary's special tokens by their text.
    """
    start = f"{_FORM}{form}\nstart: form | calls\n"
    if tools is PYTHONIC:
        names = " | ".join([json.dumps(name) for name in schemas if is_name(name)])
        return f"{start}NAME: {names}\n{_PYTHON_CALLS.lstrip()}" if names else None
    if tools is LLAMA3_JSON:  # its calls begin as the form does, so they are JSON alike
        members = {"name": {"enum": list(schemas)}, "parameters": {"type": "object"}}
        call = {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
        }
        return f'{start}calls: object ("; " object)*\nobject: %json {json.dumps(call)}\n'
    grammar = CallGrammar(schemas, None, special)
    if tools is HARMONY:
        start = f"{_FORM}{form}\nstart: {grammar.text(FINAL)} form | calls\n"
    try:
        return start + grammar.lark(tools.grammar(grammar)).replace("start:", "calls:", 1)
    except NoGrammarError:
        return None


def form_beside_calls(grammar: str) -> str | None:
    """The form's schema in a grammar of `form_or_calls`; None: it is another grammar."""
    if not grammar.startswith(_FORM):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        _, end = json.JSONDecoder().raw_decode(grammar, len(_FORM))
        if grammar.startswith("\nstart: ", end):
            return grammar[len(_FORM) : end]
    return None
