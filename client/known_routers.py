"""The common part of both kinds of client: the routers, and how they are called."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from kvrelay.client.access import OPEN, Access
from kvrelay.client.attempts import Attempts
from kvrelay.client.balancer import Balancer
from kvrelay.client.requests import Prompt, make_request
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

RETRY_SECONDS: Final = 30.0


class KnownRouters:
    """The routers of a cluster. A kind of client says how channels are opened to them.

    Args:
        servers: ``HOST:PORT`` of one or more routers.
        access: TLS and a token.
        retry_seconds: a call that may succeed later or elsewhere is tried again until this time has
            passed without anything new; 0: never.

    Raises:
        ValueError: a token would go to another machine in plain text.
        OSError: the authority's file cannot be read.
    """

    _open_channel: Callable[[str, grpc.ChannelCredentials | None], Any]

    def __init__(
        self,
        servers: str | Sequence[str],
        access: Access = OPEN,
        *,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        for server in self._servers:
            if not access.may_reach(server):
                raise ValueError(f"{server}: the token would go to another machine in plain text")
        self._access = access
        self._retry_seconds = retry_seconds
        self._balancer = Balancer(self._servers)
        credentials = access.credentials()
        self._channels = {one: self._open_channel(one, credentials) for one in self._servers}
        self._stubs = {
            server: inference_pb2_grpc.InferenceServiceStub(channel)
            for server, channel in self._channels.items()
        }

    def _attempts(self, timeout_seconds: float | None) -> Attempts:
        return Attempts(self._balancer, self._retry_seconds, timeout_seconds)

    def _request(
        self, prompt: Prompt | pb.GenerateRequest, fields: dict[str, Any]
    ) -> pb.GenerateRequest:
        """The request, with an id by which it can be tried again."""
        request = make_request(prompt, **fields)
        if request.request_id or not self._retry_seconds:
            return request
        named = pb.GenerateRequest()
        named.CopyFrom(request)
        named.request_id = uuid.uuid4().hex
        return named
