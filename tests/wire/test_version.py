"""The version that routers and workers compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from kvrelay.wire.version import digest_of_messages


def digest(
    change: Callable[[FieldDescriptorProto], None] = lambda field: None,
    enum: Mapping[str, int] = MappingProxyType({"ONE": 1}),
) -> str:
    """Of a message with an enum of these values, and a message in it, with a changed field."""
    file = FileDescriptorProto(name="a.proto", package="a", syntax="proto3")
    outer = file.message_type.add(name="Outer")
    outer.field.add(name="b", number=1, type=FieldDescriptorProto.TYPE_STRING, label=1)
    inner = outer.nested_type.add(name="Inner")
    outer.field.add(
        name="e",
        number=4,
        type=FieldDescriptorProto.TYPE_ENUM,
        label=1,
        type_name=".a.E",
    )
    values = file.enum_type.add(name="E").value
    values.add(name="ZERO", number=0)
    for name, number in enum.items():
        values.add(name=name, number=number)
    change(inner.field.add(name="c", number=2, type=FieldDescriptorProto.TYPE_UINT32, label=1))
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return digest_of_messages([pool.FindFileByName("a.proto")])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("number", 3), ("name", "d"), ("type", FieldDescriptorProto.TYPE_UINT64), ("label", 3)],
)
def test_every_change_of_a_field_changes_the_digest(attribute: str, value: object) -> None:
    unchanged = digest()
    assert unchanged == digest()
    assert unchanged != digest(lambda field: setattr(field, attribute, value))


@pytest.mark.parametrize("enum", [{"ONE": 2}, {"UNE": 1}, {}, {"ONE": 1, "TWO": 2}])
def test_every_change_of_an_enum_changes_the_digest(enum: dict[str, int]) -> None:
    assert digest(enum=enum) != digest()
