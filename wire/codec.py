"""Conversion of this room's dataclasses to protobuf and back, by fields' names and types.

A field of a dataclass goes to the message's field of the same name: a new one needs no line
here. By its type it is

- a number, a string, bytes or a bool: itself; with ``| None`` an ``optional`` field. An
  ``optional`` field without it is always sent; where it is absent the default is read;
- an enum: the value of the message's enum that ends in the member's name. A number that this
  version does not know is read as ``FAILED``, where the enum has such a member;
- a dataclass or a named tuple: a message; with ``| None`` it may be absent;
- ``tuple[X, ...]`` or ``frozenset[X]``: a ``repeated`` field; a mapping: a ``map``;
- a union, where the message has a ``oneof`` of that name. A dataclass goes to the field named after
  its class in snake case, or whose message has the class's name. A scalar goes to the field of its
  type;
- a named tuple or a dataclass, where the message has no field of that name: flat, its fields
  among the others;
- the sampled tokens of an output: ``token_ids``, packed, and ``logprobs`` if they were asked for.

`Codec` finds this out once, and raises `TypeError` if a dataclass and its message do not fit.
Fields that hold their default are not converted at all, as most fields of a token's output do.
Measured beside constructor calls written by hand: an output of one token takes as long to receive
and up to a third longer to send. Log-probabilities are converted by hand, as a token may have
twenty.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from kvrelay.v1 import inference_pb2
from kvrelay.wire.output import SampledToken, TokenLogprob

DataT = TypeVar("DataT")
MessageT = TypeVar("MessageT")

_Convert = Callable[[Any], Any]
_SCALARS = (int, float, str, bool, bytes)
_MISSING: Any = dataclasses.MISSING


class _Field(NamedTuple):
    """A field that needs a conversion, or that may be absent."""

    name: str
    default: Any
    """The value that is not sent."""
    put: Callable[[Any, dict[str, Any]], None]
    """Add what the value becomes to the arguments of the message's constructor."""
    take: _Convert
    """Return the value, from the whole message."""


class Codec(Generic[DataT, MessageT]):
    """A converter between a dataclass, or a named tuple, and its message.

    Args:
        kind: the dataclass.
        message_type: the class of its message.
        types: the types of fields whose annotation is a type variable.
    """

    def __init__(self, kind: type[DataT], message_type: type[MessageT], **types: object) -> None:
        self.kind = kind
        self._message = typing.cast("Any", message_type)
        self._is_tuple = issubclass(kind, tuple)
        hints = typing.get_type_hints(kind) | types
        known = self._message.DESCRIPTOR.fields_by_name
        scalars = [
            name
            for name, default in _defaults(kind).items()
            if hints[name] in _SCALARS
            and name in known
            and not (known[name].has_presence and default is not _MISSING)
        ]
        self._scalars = tuple(scalars)
        self._read = _reader(self._scalars)
        self._in_order = self._scalars == tuple(_defaults(kind))
        self._fields = tuple(
            self._field(name, hints[name], default)
            for name, default in _defaults(kind).items()
            if name not in scalars
        )

    def to_message(self, value: DataT) -> MessageT:
        """The message for `value`."""
        encoded: MessageT = self.encode(value)
        return encoded

    def from_message(self, message: MessageT) -> DataT:
        """The dataclass for `message`.

        Raises:
            ValueError: a ``oneof`` is empty or has a field that this version does not know, or
                the dataclass refuses a value.
        """
        decoded: DataT = self.decode(message)
        return decoded

    def encode(self, value: Any) -> Any:
        """The message for `value`: `to_message` for codecs of messages around it."""
        return self._message(**self.arguments(value))

    def arguments(self, value: Any) -> dict[str, Any]:
        """The arguments for the message's constructor."""
        scalars = value if self._is_tuple else self._read(value)
        arguments = dict(zip(self._scalars, scalars, strict=True))
        for field in self._fields:
            part = getattr(value, field.name)
            if part is not field.default:
                field.put(part, arguments)
        return arguments

    def decode(self, message: Any) -> Any:
        """The dataclass for `message`: `from_message` for codecs of messages around it."""
        if not self._fields and self._in_order:
            return self.kind(*self._read(message))
        values = dict(zip(self._scalars, self._read(message), strict=True))
        for field in self._fields:
            values[field.name] = field.take(message)
        return self.kind(**values)

    def _field(self, name: str, hint: Any, default: Any) -> _Field:
        descriptor = self._message.DESCRIPTOR
        hint, optional = _without_none(hint)
        if name in descriptor.fields_by_name:
            return _named(descriptor.fields_by_name[name], hint, default, optional)
        if name in descriptor.oneofs_by_name:
            return _oneof(descriptor.oneofs_by_name[name], hint, default, optional)
        if dataclasses.is_dataclass(hint):
            return _flat_dataclass(name, Codec(typing.cast("Any", hint), self._message))
        if _is_record(hint):
            return _flat(name, hint, descriptor)
        if hint == tuple[SampledToken, ...]:
            return _tokens(name, default)
        raise TypeError(f"{self.kind.__name__}.{name} is no field of {descriptor.name}")


def _named(field: Any, hint: Any, default: Any, optional: bool) -> _Field:
    """One field of the message, of the same name."""
    name: str = field.name
    encode, decode = _converters(field, hint)
    absent = None if optional else default
    may_be_absent = field.has_presence and absent is not _MISSING
    # An enum's UNSPECIFIED means absent. A number without presence is always there, even 0.
    unset_is_none = optional and not field.has_presence and field.enum_type is not None

    def put(part: Any, arguments: dict[str, Any]) -> None:
        if part is not None:
            arguments[name] = encode(part)

    def take(message: Any) -> Any:
        if may_be_absent and not message.HasField(name):
            return absent
        part = getattr(message, name)
        return None if unset_is_none and not part else decode(part)

    is_skipped = default == absent and (optional or hint not in _SCALARS)
    return _Field(name, default if is_skipped else _MISSING, put, take)


def _flat_dataclass(name: str, codec: Codec[Any, Any]) -> _Field:
    """Fields of a dataclass among those of the message, which has all of them."""

    def put(part: Any, arguments: dict[str, Any]) -> None:
        arguments.update(codec.arguments(part))

    return _Field(name, _MISSING, put, codec.decode)


def _flat(name: str, kind: Any, descriptor: Any) -> _Field:
    """Fields of a named tuple among those of the message; those that it lacks stay empty."""
    defaults = _defaults(kind)
    names = tuple(inner for inner in defaults if inner in descriptor.fields_by_name)
    if not names:
        raise TypeError(f"{name}: {descriptor.name} has none of {', '.join(defaults)}")
    lacking = {n: "" for n, d in defaults.items() if n not in names and d is _MISSING}
    read = _reader(names)

    def put(part: Any, arguments: dict[str, Any]) -> None:
        arguments.update(zip(names, read(part), strict=True))

    def take(message: Any) -> Any:
        return kind(**lacking, **dict(zip(names, read(message), strict=True)))

    return _Field(name, _MISSING, put, take)


def _tokens(name: str, default: Any) -> _Field:
    """Sampled tokens, of which most have nothing but an id."""

    def put(tokens: Any, arguments: dict[str, Any]) -> None:
        arguments["token_ids"] = [token.token_id for token in tokens]
        if tokens and tokens[0].logprob is not None:
            arguments["logprobs"] = map(_encode_logprobs, tokens)

    def take(message: Any) -> Any:
        if message.logprobs:
            return tuple(map(_decode_logprobs, message.logprobs))
        return tuple(map(SampledToken, message.token_ids))

    return _Field(name, default, put, take)


# By hand: they are the only records that a token's output may have twenty of.


def _encode_logprobs(token: SampledToken) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TokenLogprob(token_id=i, logprob=logprob) for i, logprob in token.top]
    return inference_pb2.TokenLogprobs(
        token_id=token.token_id, logprob=token.logprob, top=top, rank=token.rank
    )


# A named tuple's own constructor takes twice as long.
_top = functools.partial(tuple.__new__, TokenLogprob)


def _decode_logprobs(message: inference_pb2.TokenLogprobs) -> SampledToken:
    top = tuple([_top((one.token_id, one.logprob)) for one in message.top])
    return SampledToken(message.token_id, message.logprob, top, message.rank or None)


def _oneof(oneof: Any, hint: Any, default: Any, optional: bool) -> _Field:
    """One of several fields of the message, by the value's type."""
    kinds = typing.get_args(hint) or (hint,)
    by_kind: dict[type, tuple[str, _Convert]] = {}
    by_name: dict[str, _Convert] = {}
    for kind in kinds:
        field = _field_for(kind, oneof)
        encode, decode = _converters(field, kind)
        by_kind[kind] = field.name, encode
        by_name[field.name] = decode
    name: str = oneof.name

    def put(part: Any, arguments: dict[str, Any]) -> None:
        if part is not None:
            chosen, encode = by_kind[type(part)]
            arguments[chosen] = encode(part)

    def take(message: Any) -> Any:
        chosen = message.WhichOneof(name)
        if chosen is None and optional:
            return None
        if chosen not in by_name:
            raise ValueError(f"unknown {name} of {oneof.containing_type.name}: {chosen}")
        return by_name[chosen](getattr(message, chosen))

    return _Field(name, default, put, take)


def _field_for(kind: Any, oneof: Any) -> Any:
    """The field of a ``oneof`` for values of one type."""
    for field in oneof.fields:
        if _is_record(kind):
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
            message = field.message_type
            fits = message is not None and (field.name == snake or message.name == kind.__name__)
        else:
            is_text = field.cpp_type == field.CPPTYPE_STRING
            fits = field.message_type is None and is_text == (kind is str)
        if fits:
            return field
    raise TypeError(f"{oneof.containing_type.name}.{oneof.name} has no field for {kind.__name__}")


def _converters(field: Any, hint: Any) -> tuple[_Convert, _Convert]:
    """The functions that convert a value to the message's field, and back."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, frozenset):
        encode, decode = _converters(field, arguments[0])
        if encode is _same:
            return _same, lambda parts: origin(parts[:])  # a list first: half the time
        return lambda parts: map(encode, parts), lambda parts: origin(map(decode, parts))
    if origin is not None and issubclass(origin, Mapping):
        return _same, dict
    if hint in _SCALARS:
        return _same, _same
    if hint is SampledToken:
        return _encode_logprobs, _decode_logprobs
    if issubclass(hint, Enum):
        return _enum_converters(hint, field.enum_type)
    codec: Codec[Any, Any] = Codec(hint, field.message_type._concrete_class)
    return codec.encode, codec.decode


def _enum_converters(kind: type[Enum], enum: Any) -> tuple[_Convert, _Convert]:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {member: enum.values_by_name[prefix + member.name].number for member in kind}
    members = {number: member for member, number in numbers.items()}
    unknown = kind.__members__.get("FAILED")

    def decode(number: int) -> Enum:
        member = members.get(number, unknown)
        if member is None:
            raise ValueError(f"{enum.name} has no value {number}")
        return member

    return numbers.__getitem__, decode


def _defaults(kind: Any) -> dict[str, Any]:
    """The fields that the constructor takes, in order, with their defaults."""
    if issubclass(kind, tuple):
        return {name: kind._field_defaults.get(name, _MISSING) for name in kind._fields}
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _is_record(hint: Any) -> bool:
    """Whether it is a dataclass or a named tuple."""
    return dataclasses.is_dataclass(hint) or hasattr(hint, "_field_defaults")


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without ``None``, and whether it was one of its cases."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    cases = typing.get_args(hint)
    rest = tuple(case for case in cases if case is not type(None))
    return typing.Union[rest], len(rest) < len(cases)  # noqa: UP007 (of a tuple)


def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads attributes into a tuple, however many they are."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _same(part: Any) -> Any:
    return part
