"""The structured output that a request asks for, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvrelay.router.admission.structured_outputs import FIELD
from kvrelay.router.doors.http.fields import Fields, Schema
from kvrelay.router.errors import InvalidField
from kvrelay.v1 import inference_pb2

ANY_OBJECT: Final = '{"type": "object"}'
_SCHEMA: Final[Schema] = {"type": ["object", "boolean", "string"]}
"""The schema of a JSON schema, or of a text that is one."""
_KIND: Final[Schema] = {"enum": ["text", "json_object", "json_schema"]}
Wanted = tuple[str, inference_pb2.StructuredOutput]
"""The name of the member that asks for a structure, and that structure."""


def read_structured(fields: Fields, params: inference_pb2.SamplingParams) -> Mapping[str, str]:
    """Read `response_format`, `structured_outputs` and `guided_…`, of which one may be given.

    Returns:
        the body's names of the fields that are set in `params`.
    """
    given = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    if not given:
        return {}
    (name, wanted), *others = given
    if others:
        raise InvalidField(others[0][0], f"is not allowed with {name}")
    params.structured_output.CopyFrom(wanted)
    forms = [descriptor.name for descriptor, _ in wanted.ListFields()]
    return {FIELD: name, **{f"{FIELD}.{form}": name for form in forms}}


def _response_format(fields: Fields) -> list[Wanted]:
    name = "response_format"
    given = fields.object(name)
    if given is None:
        return []
    kind = given.take("type", _KIND)
    if kind == "json_schema":
        described = given.object("json_schema")
        given.finish()
        if described is None:
            raise InvalidField(f"{name}.json_schema", "is missing")
        described.ignore("name", "description", "strict")
        schema = described.take("schema", _SCHEMA)
        described.finish()
        return [_of_schema(f"{name}.json_schema.schema", schema)]
    given.finish()
    if kind == "json_object":
        return [(name, inference_pb2.StructuredOutput(json_schema=ANY_OBJECT))]
    if kind != "text":
        raise InvalidField(f"{name}.type", 'must be "text", "json_object" or "json_schema"')
    return []


def _structured_outputs(fields: Fields) -> list[Wanted]:
    name = "structured_outputs"
    given = fields.object(name)
    if given is None:
        return []
    wanted = _forms(given, f"{name}.")
    if given.flag("json_object"):
        any_object = inference_pb2.StructuredOutput(json_schema=ANY_OBJECT)
        wanted.append((f"{name}.json_object", any_object))
    given.finish()
    if not wanted:
        raise InvalidField(name, "must have json, regex, choice, grammar or json_object")
    return wanted


def _guided(fields: Fields) -> list[Wanted]:
    return _forms(fields, "", prefix="guided_")


def _forms(fields: Fields, inside: str, prefix: str = "") -> list[Wanted]:
    """Read vLLM's forms whose names begin with the prefix."""
    wanted = []
    schema = fields.take(f"{prefix}json", _SCHEMA)
    if schema is not None:
        wanted.append(_of_schema(f"{inside}{prefix}json", schema))
    for form in ("regex", "grammar"):
        text = fields.text(prefix + form)
        if text is not None:
            message = inference_pb2.StructuredOutput(**{form: text})
            wanted.append((inside + prefix + form, message))
    choice = fields.strings(f"{prefix}choice")
    if choice:
        message = inference_pb2.StructuredOutput(choice=choice)
        wanted.append((f"{inside}{prefix}choice", message))
    return wanted


def _of_schema(name: str, schema: Any) -> Wanted:
    """Convert a schema that came as an object, or as a text of one."""
    if isinstance(schema, dict | bool):
        schema = json.dumps(schema, ensure_ascii=False)
    if not isinstance(schema, str):
        raise InvalidField(name, "must be a JSON schema")
    return name, inference_pb2.StructuredOutput(json_schema=schema)
