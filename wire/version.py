"""The version of kvrelay that the processes of a cluster tell each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, Final

from kvrelay.v1 import controller_pb2, hand_over_pb2, inference_pb2, worker_pb2

_FILES: Final = (inference_pb2, worker_pb2, hand_over_pb2, controller_pb2)
"""The files with messages between a router, its workers and the controller."""


def _fields(message: Any) -> Iterator[str]:
    """Yield a line for each field of a message, for its inner messages' fields and enum values."""
    for field in message.fields:
        of = field.message_type or field.enum_type
        kind = of.full_name if of else field.type
        many = "many" if field.is_repeated else "one"
        yield f"{message.full_name}.{field.name} {field.number} {kind} {many}"
        for value in field.enum_type.values if field.enum_type else ():
            yield f"{kind}.{value.name} {value.number}"
    for inner in message.nested_types:
        yield from _fields(inner)


def digest_of_messages(files: Iterable[Any]) -> str:
    """A digest of the messages in these file descriptors; comments do not change it."""
    messages = [one for file in files for one in file.message_types_by_name.values()]
    lines = sorted(line for message in messages for line in _fields(message))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


VERSION: Final = f"{version('kvrelay')} ({digest_of_messages(file.DESCRIPTOR for file in _FILES)})"
"""The version of the package, with a part of a hash of all messages between processes.

A router and its workers are of one version: messages have meanings that no field tells.
"""
