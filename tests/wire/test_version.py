"""The version that routers and workers compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from kvrelay.wire.version import digest_of_messages


def digest(change: Callable[[FieldDescriptorProto], None]) -> str:
    """Of a message with one field, and a message in it, after `change` of the inner one's field."""
    file = FileDescriptorProto(name="a.proto", package="a", syntax="proto3")
    outer = file.message_type.add(name="Outer")
    outer.field.add(name="b", number=1, type=FieldDescriptorProto.TYPE_STRING, label=1)
    inner = outer.nested_type.add(name="Inner")
    change(inner.field.add(name="c", number=2, type=FieldDescriptorProto.TYPE_UINT32, label=1))
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return digest_of_messages([pool.FindFileByName("a.proto")])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("number", 3), ("name", "d"), ("type", FieldDescriptorProto.TYPE_UINT64), ("label", 3)],
)
def test_every_change_of_a_field_changes_the_digest(attribute: str, value: object) -> None:
    unchanged = digest(lambda field: None)
    assert unchanged == digest(lambda field: None)
    assert unchanged != digest(lambda field: setattr(field, attribute, value))
