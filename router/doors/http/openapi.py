"""The OpenAPI document of the HTTP door, whose bodies are the models that read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from pydantic import TypeAdapter

from kvrelay.router.doors.http.errors import ERROR_SCHEMA, STATUSES

PATH: Final = "/openapi.json"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_SCHEMES: Final = {
    "token": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


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
    body: Any = None
    """The model of its body, or a union of models; None: it has none."""
    link: OperationLink | None = None
    """A link to an operation that may be called next."""


def document(operations: Sequence[Operation], *, has_tokens: bool) -> dict[str, Any]:
    """Return the whole document.

    Args:
        operations: the door's operations.
        has_tokens: whether callers must show a token.
    """
    with_bodies = [one for one in operations if one.body is not None]
    shapes, definitions = TypeAdapter.json_schemas(
        [(one.path, "validation", TypeAdapter(one.body)) for one in with_bodies],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        told = paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
        if one.body is not None:
            schema = shapes[one.path, "validation"]
            told["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        if has_tokens and one.needs_token:
            told["security"] = [{name: []} for name in _SCHEMES]
    schemes = _SCHEMES if has_tokens else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version("kvrelay")},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR_SCHEMA, **definitions["$defs"]},
            "securitySchemes": schemes,
        },
    }


def _operation(one: Operation) -> dict[str, Any]:
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
    return told


def _link(link: OperationLink) -> Mapping[str, Any]:
    path = link.path.replace("/", "~1")
    return {
        "operationRef": f"#/paths/{path}/{link.method.lower()}",
        "parameters": {link.parameter: f"$response.body#{link.member}"},
    }


def _of_media(media: str) -> Mapping[str, Any]:
    if media == EVENTS:  # readers take an event with a name for an object
        return {"type": ["string", "object"]}
    return {"type": "object" if media == JSON else "string"}


def about(handler: Callable[..., Any]) -> str:
    """Return a handler's description, from the first line of its docstring after the path."""
    said = (inspect.getdoc(handler) or "").partition("\n")[0].partition(": ")[2]
    return said[:1].upper() + said[1:]
