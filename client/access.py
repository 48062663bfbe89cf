"""The access of a client to a cluster: TLS and a token."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

MAX_MESSAGE_BYTES: Final = 64 << 20
_KEEPALIVE_MS: Final = 20_000
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A machine, or a network, that fails silently in mid-stream is found within 40 s.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no bound
    # A router that is back is found soon, and not after two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """TLS and a token.

    With neither, the client speaks plain text to a router that asks for no token.
    """

    tls: bool = False
    """Whether to use TLS."""
    ca: Path | None = None
    """The authority that must have signed the server's certificate; None: any public authority."""
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> Metadata:
        """The gRPC metadata that is sent with every call."""
        return () if self.token is None else bearer(self.token)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a channel; None: plain text. Raises OSError if `ca` cannot be read."""
        if self.ca is not None:
            return grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.ssl_channel_credentials() if self.tls else None

    def may_reach(self, server: str) -> bool:
        """Whether the token, if any, stays on this machine or is sent by TLS."""
        return self.token is None or self.tls or self.ca is not None or is_loopback(server)


OPEN: Final = Access()


def bearer(token: str) -> Metadata:
    """The metadata with which a client sends this token."""
    return (("authorization", f"Bearer {token}"),)


def is_loopback(server: str) -> bool:
    """Whether ``HOST:PORT`` is on this machine for sure."""
    host = server.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(server: str) -> list[tuple[str, Any]]:
    """Options of a channel to a router."""
    if not is_loopback(server):
        return list(_OPTIONS)
    # Not through the user's web proxy, which would look for it on its own machine.
    return [*_OPTIONS, ("grpc.enable_http_proxy", 0)]


def open_channel(server: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel to ``HOST:PORT``, for threads; without credentials, in plain text."""
    if credentials is None:
        return grpc.insecure_channel(server, channel_options(server))
    return grpc.secure_channel(server, credentials, channel_options(server))


def open_aio_channel(server: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """A channel to ``HOST:PORT``, for asyncio; without credentials, in plain text."""
    if credentials is None:
        return grpc.aio.insecure_channel(server, channel_options(server))
    return grpc.aio.secure_channel(server, credentials, channel_options(server))
