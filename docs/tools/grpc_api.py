"""The public gRPC services as Markdown, from the comments in their .proto files.

protoc reads the files (`--include_source_info`), so the page says what the stubs were made from.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTO: Final = Path(__file__).resolve().parents[2] / "proto"
PUBLIC: Final = ("kvrelay/v1/inference.proto", "kvrelay/v1/admin.proto")
# Field numbers of descriptor.proto, of which the paths of source locations consist.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED_ENUMS, _METHODS, _VALUES = 2, 4, 2, 2

Place = tuple[int, ...]


def markdown() -> str:
    """The sections of all public services, messages and enums."""
    parts = []
    for file in _described(PUBLIC):
        comments = _Comments(file)
        for number, service in enumerate(file.service):
            parts.append(_service(service, (_SERVICES, number), comments))
        for number, message in enumerate(file.message_type):
            parts.append(_message(message, message.name, (_MESSAGES, number), comments))
        for number, enum in enumerate(file.enum_type):
            parts.append(_enum(enum, enum.name, (_ENUMS, number), comments))
    return "\n\n".join(parts)


def _described(files: Sequence[str]) -> Sequence[FileDescriptorProto]:
    with tempfile.NamedTemporaryFile() as output:
        # A process of its own: importing NIXL aborts one that has imported protoc, as tests may.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", "--include_source_info"]
        command += ["--include_imports", f"--descriptor_set_out={output.name}", *files]
        subprocess.run(command, check=True)  # noqa: S603 (the project's own files)
        described = FileDescriptorSet.FromString(Path(output.name).read_bytes())
    return [file for file in described.file if file.name in files]


class _Comments:
    """What stands before or behind each declaration of a file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._text = {
            tuple(location.path): f"{location.leading_comments} {location.trailing_comments}"
            for location in file.source_code_info.location
        }

    def of(self, path: Place) -> str:
        """In one line, ending in a full stop; empty if there is none."""
        text = " ".join(self._text.get(path, "").split())
        if not text:
            return ""
        text = re.sub(r"<", "&lt;", text)
        return text[0].upper() + text[1:] + ("" if text.endswith((".", "?", ":")) else ".")


def _service(service: ServiceDescriptorProto, path: Place, comments: _Comments) -> str:
    lines = _heading(service.name, comments.of(path))
    lines += ["| method | request | response | |", "| --- | --- | --- | --- |"]
    for number, method in enumerate(service.method):
        asked, answered = _link(method.input_type), _link(method.output_type)
        if method.server_streaming:
            answered = f"stream of {answered}"
        text = comments.of((*path, _METHODS, number))
        lines.append(f"| `{method.name}` | {asked} | {answered} | {_cell(text)} |")
    return "\n".join(lines)


def _message(message: DescriptorProto, name: str, path: Place, comments: _Comments) -> str:
    lines = _heading(name, comments.of(path))
    if message.field:
        lines += ["| field | type | |", "| --- | --- | --- |"]
        for number, field in enumerate(message.field):
            text = _with_oneof(comments.of((*path, _FIELDS, number)), field, message)
            lines.append(f"| `{field.name}` | {_type(field, message)} | {_cell(text)} |")
    else:
        lines.append("It has no fields.")
    for number, enum in enumerate(message.enum_type):
        place = (*path, _NESTED_ENUMS, number)
        lines += ["", _enum(enum, f"{name}.{enum.name}", place, comments)]
    return "\n".join(lines)


def _enum(enum: EnumDescriptorProto, name: str, path: Place, comments: _Comments) -> str:
    lines = _heading(name, comments.of(path))
    lines += ["| value | number | |", "| --- | ---: | --- |"]
    for number, value in enumerate(enum.value):
        text = comments.of((*path, _VALUES, number))
        lines.append(f"| `{value.name}` | {value.number} | {_cell(text)} |")
    return "\n".join(lines)


def _heading(name: str, text: str) -> list[str]:
    return [f"### {name}", "", *([text, ""] if text else [])]


def _with_oneof(text: str, field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return text
    return f"{text} Oneof `{message.oneof_decl[field.oneof_index].name}`.".strip()


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if not field.type_name:
        text = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    elif (entry := _entry(field, message)) is not None:
        key, value = (_type(one, entry) for one in entry.field)
        return f"map of {key} to {value}"
    else:
        text = _link(field.type_name)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    return f"optional {text}" if field.proto3_optional else text


def _entry(field: FieldDescriptorProto, message: DescriptorProto) -> DescriptorProto | None:
    """The message that a map's entries are; None: the field is no map."""
    name = field.type_name.rpartition(".")[2]
    found = [one for one in message.nested_type if one.name == name and one.options.map_entry]
    return found[0] if found else None


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".kvrelay.v1.")
    return f"[{name}](#{re.sub(r'[^a-z0-9]', '', name.lower())})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
