"""A cluster's services, as the command line calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from kvrelay.deploy.address import Address
from kvrelay.deploy.errors import DeployError
from kvrelay.v1 import inference_pb2_grpc as rpc

_MAX_MESSAGE_BYTES: Final = 64 << 20


@contextmanager
def connected(server: Address, stub: Any = rpc.InferenceServiceStub) -> Iterator[Any]:
    """A stub, of the InferenceService unless said otherwise, at `server`.

    A call's error leaves the context as DeployError: server, status and
    message in one line.
    """
    options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
    if server.is_loopback:
        # Not through the user's web proxy, which would look for it on its own machine.
        options.append(("grpc.enable_http_proxy", 0))
    with grpc.insecure_channel(str(server), options=options) as channel:
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise DeployError(f"{server}: {error.code().name}: {error.details()}") from error
