"""Chat templates of checkpoints, which render a conversation as one text.

Templates are Jinja, rendered as transformers does: in a sandbox, which keeps them from
everything but their variables. A template can loop without end, so it comes from the checkpoint
or the operator, never from a request.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrelay.text.byte_ranks import tekken_roles

Message = Mapping[str, Any]
_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""A mark, as in transformers; the space at its end shows whether templates strip contents."""


class TemplateError(Exception):
    """A template cannot be read, or cannot render a conversation; the message is one line."""


class ChatTemplate:
    """A chat template.

    Args:
        source: the template, in Jinja.
        special_tokens: the tokenizer's, by their role, such as `eos_token`.

    Raises:
        TemplateError: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is no Jinja: {_line(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: the messages, each with `role` and `content`.
            add_generation_prompt: end the text where the assistant's next message begins.
            continue_final_message: end the text within the last message, which the model continues.
            tools: the tools that the model may call, each a JSON object.
            variables: further variables of the template.

        Raises:
            TemplateError: the template refuses the conversation, or fails.
        """
        if continue_final_message:
            messages = _marked(messages)
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(given)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses it: {_line(error)}") from error
        except Exception as error:  # what its expressions raise, of whatever type
            raise TemplateError(f"the chat template fails: {_line(error)}") from error
        return _cut_at_mark(text) if continue_final_message else text


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The template of the checkpoint in `folder`; None: it has none.

    Args:
        folder: the checkpoint's folder.
        file: a template to use in place of the checkpoint's own.

    Raises:
        TemplateError: it cannot be read, or is no template.
    """
    config = _json(folder / "tokenizer_config.json")
    source = _read(file) if file is not None else _own_template(folder, config)
    return None if source is None else ChatTemplate(source, special_tokens_of(folder))


def special_tokens_of(folder: Path) -> dict[str, str]:
    """The special tokens of the checkpoint in `folder` by their role, such as `eos_token`."""
    found = tekken_roles(folder)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        described = _json(folder / name)
        for role in _SPECIAL_TOKENS:
            token = described.get(role)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found[role] = content
    return found


def _own_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read(path)
    for described in (config, _json(folder / "chat_template.json")):
        source = described.get("chat_template")
        if isinstance(source, str):
            return source
        if isinstance(source, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in source}
            return named.get("default")
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: cannot be read: {_line(error)}") from error


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TemplateError(f"{path}: cannot be read: {_line(error)}") from error
    return content if isinstance(content, dict) else {}


def _marked(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, with a mark where the last one's content ends."""
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise TemplateError("the last message has no content to be continued")
    return [*messages[:-1], {**messages[-1], "content": content + _MARK}]


def _cut_at_mark(text: str) -> str:
    """The text before the mark; without the mark's space where the template strips contents."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise TemplateError("the template does not show the last message, which is to be continued")
    before = text[:at]
    return before if text.startswith(_MARK, at) else before.rstrip()


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks training data: it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's `tojson`, which escapes for HTML: a prompt needs no such escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
