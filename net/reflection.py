"""gRPC's reflection service under both of its names.

The package has v1alpha alone, and newer clients ask for v1 first; the messages of both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1: Final = "grpc.reflection.v1.ServerReflection"


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let the server tell its clients of these services, and of reflection itself."""
    named = [*services, _V1, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(named, server)
    servicer = reflection.aio.ReflectionServicer(named)
    told = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    method = {"ServerReflectionInfo": told}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1, method),))
