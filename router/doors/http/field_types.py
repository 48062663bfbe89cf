"""The types of members that pydantic does not have, each with its JSON schema and its refusals.

A validator raises `ValueError` with the problem; `json_body` names the member.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from kvrelay.wire.history_digest import FORM, digest_tokens

MAX_PROMPTS: Final = 256
"""The most prompts of one call; each is a request of its own."""
_UINT32: Final = (1 << 32) - 1
_INT32: Final = (1 << 31) - 1
_LARGEST_FLOAT32: Final = 3.4028234e38


@dataclass(frozen=True)
class Expected:
    """The one problem that is told of a value that fits none of several types."""

    problem: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="expected", custom_error_message=self.problem
        )


class Only:
    """The values that are served of a member, which other servers take more of.

    None equals another: `typing` would take `Only(True)` for `Only(1)`.
    """

    def __init__(self, *allowed: Any) -> None:
        self.allowed = allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.allowed, None]}

    def _check(self, given: Any) -> Any:
        if given is not None and not any(_same(given, one) for one in self.allowed):
            served = " or ".join(json.dumps(one) for one in self.allowed)
            raise ValueError(f"is not served{f', but for {served}' if served else ''}")
        return given


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON: true and 1 are equal only in Python."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


@dataclass(frozen=True)
class AsSent:
    """The type of an object that a model reads, and whose other members and order are kept."""

    model: type[BaseModel]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._read, handler.generate_schema(self.model)
        )

    def _read(self, given: Any, read: Any) -> dict[str, Any]:
        members = vars(read(given)).items()
        return {**given, **{name: value for name, value in members if value is not None}}


def _whole(value: Any) -> Any:
    """Return a number as JSON means it: 5.0 is the integer 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_float32(value: float) -> float:
    if abs(value) > _LARGEST_FLOAT32:
        raise ValueError("is too large")
    return value


def _as_list(given: str | list[str]) -> list[str]:
    if given == "":  # some clients' way to leave it out
        return []
    return [given] if isinstance(given, str) else given


def token_ids(given: Any) -> array[int]:
    """Convert a JSON list to token ids of 4 bytes; raise `ValueError` if it is no such list."""
    if not isinstance(given, list):
        raise ValueError("must be a list of token ids")
    kinds = set(map(type, given))
    if float in kinds:
        given = [_whole(one) for one in given]
        kinds = set(map(type, given))
    if kinds - {int}:
        raise ValueError("must be a list of token ids")
    try:
        return array("I", given)
    except OverflowError:
        raise ValueError(f"token ids must be in [0, {_UINT32}]") from None


def _keep_64_bits(seed: int) -> int:
    return seed & ((1 << 64) - 1)  # a negative one is as good as any other


def _by_token_id(given: dict[str, float | None]) -> dict[int, float]:
    read = {}
    for name, bias in given.items():
        is_id = name.isascii() and name.isdecimal() and len(name.lstrip("0")) <= 10
        if not is_id or int(name) > _UINT32:
            raise ValueError(f"must have token ids as its names, got {json.dumps(name[:64])}")
        read[int(name)] = min(max(bias or 0.0, -1e30), 1e30)
    return read


def _as_text(schema: Object | bool | str) -> str:
    try:
        return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _read_prompts(given: Any) -> list[str | Sequence[int]]:
    is_number = isinstance(given, list) and given and type(given[0]) in (int, float)
    if isinstance(given, str) or is_number:
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("must be a text, token ids, or a list of either")
    if len(given) > MAX_PROMPTS:
        raise ValueError(f"has {len(given)} prompts; the router takes {MAX_PROMPTS}")
    return [one if isinstance(one, str) else token_ids(one) for one in given]


def _check_digest(digest: str) -> str:
    digest_tokens(digest)
    return digest


Object = dict[str, Any]
_Whole: Final = BeforeValidator(_whole)
UInt32 = Annotated[int, Field(ge=0, le=_UINT32), _Whole]
Int32 = Annotated[int, Field(ge=-_INT32, le=_INT32), _Whole]
PositiveInt32 = Annotated[int, Field(ge=1, le=_INT32), _Whole]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1), _Whole, AfterValidator(_keep_64_bits)]
Float32 = Annotated[float, AfterValidator(_check_float32)]
Strings = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)],
    Expected("must be a string, or a list of strings"),
    AfterValidator(_as_list),
]
"""One string, or a list of them; read as a list."""
TokenIds = Annotated[Sequence[int], PlainValidator(token_ids, json_schema_input_type=list[UInt32])]
_SomeIds = Annotated[list[UInt32], Field(min_length=1)]
_SomePrompts = Annotated[list[str | _SomeIds], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    list[str | Sequence[int]],
    PlainValidator(_read_prompts, json_schema_input_type=str | _SomeIds | _SomePrompts),
]
"""Texts and lists of token ids, of which one may come without a list around it."""
LogitBias = Annotated[
    dict[str, float | None],
    Field(fail_fast=True),
    AfterValidator(_by_token_id),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": ["number", "null"]},
        }
    ),
]
"""Biases by token id."""
JsonSchema = Annotated[
    Object | bool | str, Expected("must be a JSON schema"), AfterValidator(_as_text)
]
"""A JSON schema, or the text of one; read as text."""
HistoryDigest = Annotated[
    str,
    AfterValidator(_check_digest),
    WithJsonSchema({"type": "string", "pattern": f"^{FORM}$"}),
]
