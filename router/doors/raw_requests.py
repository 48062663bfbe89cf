"""Messages as bytes: the methods that take or answer them so, and the size of a request's parts.

Parsing blocks the event loop: 16 MiB of token ids take 70 ms. So a message that cannot be served is
refused by the size of its parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvrelay.v1 import inference_pb2

_MAX_FIELDS: Final = 64
"""The most fields at the top of a message; a GenerateRequest has six."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_FIELDS: Final = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
_TEXT: Final = _FIELDS["text"].number
_INPUT_IDS: Final = _FIELDS["input_ids"].number


@dataclass(frozen=True, slots=True)
class PartBytes:
    """The bytes of a GenerateRequest's parts."""

    text: int
    input_ids: int
    rest: int


def measure_parts(raw: bytes) -> PartBytes:
    """Measure the parts of a serialized GenerateRequest.

    Raises:
        ValueError: it is malformed, or has more fields than any client would send.
    """
    sizes: dict[int, int] = {}
    position = 0
    for _ in range(_MAX_FIELDS):
        if position == len(raw):
            text, input_ids = sizes.get(_TEXT, 0), sizes.get(_INPUT_IDS, 0)
            return PartBytes(text, input_ids, len(raw) - text - input_ids)
        tag, position = _read_varint(raw, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _BYTES:
            size, position = _read_varint(raw, position)
            sizes[number] = sizes.get(number, 0) + size
            position += size
        elif wire_type == _VARINT:
            _, position = _read_varint(raw, position)
        elif wire_type in _FIXED_SIZES:
            position += _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if position > len(raw):
            raise ValueError("it is cut off")
    raise ValueError(f"it has more than {_MAX_FIELDS} fields")


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position == len(raw):
            raise ValueError("it is cut off")
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has more than ten bytes")


class RawMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that gives the handlers of some methods a request's bytes, unparsed.

    Args:
        taken: the methods.
        answered: the methods among them that answer with bytes, too.
    """

    def __init__(self, taken: Set[str], answered: Set[str]) -> None:
        self._taken = taken
        self._answered = answered

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler, without its request parser if it is one of the methods."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method not in self._taken:
            return handler
        serialize = None if method in self._answered else handler.response_serializer
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                handler.unary_stream, response_serializer=serialize
            )
        return grpc.unary_unary_rpc_method_handler(
            handler.unary_unary, response_serializer=serialize
        )
