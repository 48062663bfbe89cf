"""The OpenAPI document of the HTTP door, made by the code that reads the bodies.

The readers of bodies are run on examples that lead through each of their branches, with `Described`
in place of `Fields`. It records which members they take, with the schemas of these.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from kvrelay.router.admission.served_tokenizer import Texts
from kvrelay.router.doors.http.chat_tools import Dialect
from kvrelay.router.doors.http.completion_bodies import (
    read_chat_completion,
    read_completion,
    read_open_session,
)
from kvrelay.router.doors.http.errors import ERROR_SCHEMA, STATUSES
from kvrelay.router.doors.http.fields import TOKEN_IDS, Fields, Schema
from kvrelay.router.doors.http.tokenizer_calls import read_detokenize, read_tokenize
from kvrelay.router.errors import InvalidField
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.output_parsers.formats import ToolFormat

PATH: Final = "/openapi.json"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_NULL: Final[Schema] = {"type": "null"}
_MESSAGE: Final = {"role": "user", "content": "x"}
_TOOL: Final = {"type": "function", "function": {"name": "f"}}
_FORMS: Final[Sequence[Mapping[str, Any]]] = (
    {"stream": True, "stream_options": {}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
    {"structured_outputs": {"json": {}}},
)
"""The examples' members that have members of their own."""
_TOOL_CALLS: Final[Mapping[str, Any]] = {"tools": [_TOOL], "tool_choice": "required"}


@dataclass
class Members:
    """The members of an object that a reader has taken, with their schemas."""

    shapes: dict[str, Schema | Members] = field(default_factory=dict)
    open: bool = True
    """Whether it may have other members as well."""

    def schema(self, required: Sequence[str] = ()) -> dict[str, Any]:
        """Return the object's JSON schema; null stands for an absent, optional member."""
        properties = {
            name: shape if name in required else _or_null(shape)
            for name, shape in (
                (name, shape.schema() if isinstance(shape, Members) else dict(shape))
                for name, shape in sorted(self.shapes.items())
            )
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            schema["required"] = list(required)
        if not self.open:
            schema["additionalProperties"] = _NULL
        return schema


class Described(Fields):
    """The fields of an example body, which record what a reader takes.

    Args:
        example: an example of a body.
        described: the record of the members taken, shared by all examples of a body.
        inside: the object's own name, as in `Fields`.
    """

    def __init__(self, example: dict[str, Any], described: Members, inside: str = "") -> None:
        super().__init__(example, inside)
        self._described = described

    def take(self, name: str, shape: Schema = {}) -> Any:  # noqa: B006
        """Record and take a member of any type."""
        self._described.shapes.setdefault(name, shape)
        return super().take(name)

    def text(self, name: str) -> str | None:
        """Record and take a string."""
        self._is(name, {"type": "string"})
        return super().text(name)

    def flag(self, name: str) -> bool:
        """Record and take true or false."""
        self._is(name, {"type": "boolean"})
        return super().flag(name)

    def optional_flag(self, name: str) -> bool | None:
        """Record and take true or false."""
        self._is(name, {"type": "boolean"})
        return super().optional_flag(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Record and take a whole number."""
        self._is(name, {"type": "integer", "minimum": low, "maximum": high})
        return super().integer(name, low, high)

    def number(self, name: str) -> float | None:
        """Record and take a number."""
        self._is(name, {"type": "number"})
        return super().number(name)

    def strings(self, name: str) -> Sequence[str]:
        """Record and take one string, or a list of them."""
        text = {"type": "string"}
        self._is(name, {"anyOf": [text, {"type": "array", "items": text}]})
        return super().strings(name)

    def token_ids(self, name: str) -> Sequence[int]:
        """Record and take a list of token ids."""
        self._is(name, TOKEN_IDS)
        return super().token_ids(name)

    def object(self, name: str) -> Fields | None:
        """Record and take an object, as `Described` of its members."""
        inner = self._described.shapes.setdefault(name, Members())
        assert isinstance(inner, Members), name
        value = super().members(name)
        return None if value is None else Described(value, inner, self._inside + name)

    def members(self, name: str, shape: Schema = {"type": "object"}) -> dict[str, Any] | None:  # noqa: B006
        """Record and take an object as a dict."""
        self._is(name, shape)
        return super().members(name)

    def only(self, name: str, *allowed: Any) -> None:
        """Record the values that are served, and refuse others."""
        self._is(name, {"enum": list(allowed)})
        super().only(name, *allowed)

    def finish(self) -> None:
        """Record that there are no other members."""
        self._described.open = False
        super().finish()

    def _is(self, name: str, shape: Schema) -> None:
        self._described.shapes[name] = shape


@dataclass(frozen=True)
class OperationLink:
    """A link from a good answer to another operation: a member is a value for its parameter."""

    path: str
    """The path of the other operation, with its parameters in braces."""
    method: str
    parameter: str
    member: str
    """The member of the answer, as a JSON pointer."""


@dataclass(frozen=True)
class Operation:
    """One path with one method."""

    path: str
    """The path, with its parameters in braces."""
    method: str
    about: str
    needs_token: bool
    answers: Sequence[str]
    """The media types of good answers; empty: the answers are empty."""
    body: Mapping[str, Any] | None = None
    """The JSON schema of its body; None: it has none."""
    link: OperationLink | None = None
    """A link to an operation that may be called next."""


def bodies(texts: Texts) -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON schema of the body of each path that takes one."""
    template = ChatTemplate("", {})

    def tokenize(fields: Fields) -> None:
        read_tokenize(fields, 0, texts, template)

    dialect = Dialect(template, ToolFormat.HERMES, calls_are_parsed=True, reasons=False)
    chat: dict[str, Any] = {"messages": [_MESSAGE]}
    prompt = {"prompt": "x"}
    return {
        "/v1/completions": _schema(
            lambda fields: read_completion(fields, texts), [{**prompt, **one} for one in _FORMS]
        ),
        "/v1/chat/completions": _schema(
            lambda fields: read_chat_completion(fields, 0, texts, dialect),
            [{**chat, **one} for one in (*_FORMS, _TOOL_CALLS)],
        ),
        "/v1/sessions": _schema(read_open_session, [{}]),
        "/tokenize": {"anyOf": [_schema(tokenize, [one]) for one in (prompt, chat)]},
        "/detokenize": _schema(read_detokenize, [{"tokens": [1]}]),
    }


def _schema(read: Callable[[Fields], Any], examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of the members that `read` takes; examples cover all its branches."""
    described = Members()
    for example in examples:
        read(Described(example, described))
    return described.schema(list(_required(read, examples)))


def _required(
    read: Callable[[Fields], Any], examples: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the members without which no example is accepted."""
    for name in set(examples[0]).intersection(*examples[1:]):
        with contextlib.suppress(InvalidField):
            read(Fields({key: value for key, value in examples[0].items() if key != name}))
            continue
        yield name


def document(operations: Sequence[Operation], *, has_tokens: bool) -> dict[str, Any]:
    """Return the whole document.

    Args:
        operations: the door's operations.
        has_tokens: whether callers must show a token.
    """
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, has_tokens=has_tokens)
    schemes = {"token": {"type": "http", "scheme": "bearer"}} if has_tokens else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version("kvrelay")},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR_SCHEMA}, "securitySchemes": schemes},
    }


def _operation(one: Operation, *, has_tokens: bool) -> dict[str, Any]:
    content = {media: {"schema": _of_media(media)} for media in one.answers}
    failed = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    good: dict[str, Any] = {"description": "Served"}
    if content:
        good["content"] = content
    if one.link is not None:
        good["links"] = {one.link.parameter: _link(one.link)}
    answers: dict[str, Any] = {"200": good}
    for status, description in STATUSES.items():
        answers[str(status)] = {"description": description, "content": failed}
    if not one.answers:
        answers = {"200": good, "503": {"description": "Not served now"}}
    told: dict[str, Any] = {"summary": one.about, "responses": answers}
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    if names:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if one.body is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": one.body}}}
    if has_tokens and one.needs_token:
        told["security"] = [{"token": []}]
    return told


def _link(link: OperationLink) -> Mapping[str, Any]:
    path = link.path.replace("/", "~1")
    return {
        "operationRef": f"#/paths/{path}/{link.method.lower()}",
        "parameters": {link.parameter: f"$response.body#{link.member}"},
    }


def _of_media(media: str) -> Mapping[str, Any]:
    return {"type": "object" if media == JSON else "string"}


def _or_null(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of the shape or null."""
    if not shape:
        return shape
    if "enum" in shape:
        return {"enum": [*shape["enum"], None]}
    return {"anyOf": [shape, _NULL]}


def about(handler: Callable[..., Any]) -> str:
    """Return a handler's description, from the first line of its docstring after the path."""
    said = (inspect.getdoc(handler) or "").partition("\n")[0].partition(": ")[2]
    return said[:1].upper() + said[1:]
