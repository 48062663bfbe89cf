"""Options of gRPC channels and servers, with the same numbers at both ends."""

from __future__ import annotations

import resource
from typing import Final

from kvrelay.net.door_rules import MAX_MESSAGE_BYTES, MOST_PENDING, ListenerRule

Options = list[tuple[str, int]]

KEEPALIVE_MS: Final = 20_000
"""Either end pings a connection that was silent for this time, with or without an open call."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
"""The time within which a ping must be answered; else the connection and its streams end.

This finds a host or a network that fails silently, within 40 s. A process that dies is found
at once, because its socket closes, and its supervisor finds a process that hangs.
"""
_LEAST_PING_INTERVAL_MS: Final = KEEPALIVE_MS // 2
"""A server ends connections that ping more often. gRPC's own bound is 5 minutes."""

_KEEPALIVE: Final = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a minute
    ("grpc.http2.max_pings_without_data", 0),  # 0: no bound
]
_WITHOUT_CALLS: Final = [("grpc.keepalive_permit_without_calls", 1)]


def message_bounds(most_bytes: int) -> Options:
    """Options that bound one message, each way."""
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
    ]


def channel_options(most_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a channel to a worker."""
    return [
        *message_bounds(most_bytes),
        *_KEEPALIVE,
        *_WITHOUT_CALLS,
        ("grpc.enable_http_proxy", 0),  # never reach a worker through the user's web proxy
        # Else a channel to the same address may share a dying connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(rule: ListenerRule, most_bytes: int, *, internal: bool) -> Options:
    """Options of a server: for routers and workers (`internal`), or for clients of any kind."""
    options = [
        *message_bounds(most_bytes),
        ("grpc.so_reuseport", 0),  # else a second process could share the port unnoticed
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        ("grpc.server_handshake_timeout_ms", _ms(rule.begin_seconds)),
        ("grpc.max_allowed_incoming_connections", rule.most_connections or most_connections()),
        # gRPC ends any of more, also another's: so there may be those of several connections.
        ("grpc.server.max_pending_requests", MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
        ("grpc.max_concurrent_streams", rule.most_streams),
        ("grpc.max_metadata_size", rule.most_head_bytes),
        ("grpc.absolute_max_metadata_size", rule.most_head_bytes),
        *_KEEPALIVE,  # it ends clients that read nothing at all, too
    ]
    if internal:
        options += _WITHOUT_CALLS
    elif rule.idle_seconds is not None:
        options.append(("grpc.max_connection_idle_ms", _ms(rule.idle_seconds)))
    return options


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def most_connections() -> int:
    """The most connections of a server: half of the files that the process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
