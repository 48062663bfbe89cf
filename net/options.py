"""gRPC's options: the same numbers at both ends of every connection inside a cluster."""

from __future__ import annotations

from typing import Final

Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Between router and workers, either way; well above what a router takes from a client."""
KEEPALIVE_MS: Final = 20_000
"""A connection that has said nothing for so long is pinged, by either end, calls or none."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
"""If the answer takes longer, the other host is taken to be dead: its streams end.

A process that has died is found at once, by its closed socket, and one that hangs by its
supervisor; this finds hosts and networks that are gone without a word, within 40 s.
"""
_LEAST_PING_INTERVAL_MS: Final = KEEPALIVE_MS // 2
"""A server ends connections that ping more often. gRPC's own bound is 5 minutes."""

_KEEPALIVE: Final = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # as many as there is silence for
]


def message_bounds(most_bytes: int) -> Options:
    """Of one message, each way."""
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
    ]


def channel_options(most_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Of a channel to a worker."""
    return [
        *message_bounds(most_bytes),
        *_KEEPALIVE,
        ("grpc.enable_http_proxy", 0),  # a worker is never behind the user's web proxy
        # Else a channel to the same address may share a dying connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(most_bytes: int, *, internal: bool) -> Options:
    """Of a listener: for routers and workers, or for clients, of whom nothing is known."""
    return [
        *message_bounds(most_bytes),
        ("grpc.so_reuseport", 0),  # else a second process shares the port in silence
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
        *(_KEEPALIVE if internal else []),
    ]
