"""The rules of every door: who may call each method, and what a call may take from others.

Listeners take their limits from here. A method without a rule is not served. The caller is the
name of the call's token; without tokens, and before the token is known, it is the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

KIB: Final = 1 << 10
ANY_NUMBER: Final = (1 << 31) - 1
"""No bound, where a number is wanted."""
MOST_PENDING: Final = 8192
"""The most gRPC calls that nobody has taken yet, of all connections: each has some 14 KiB."""
MAX_MESSAGE_BYTES: Final = 64 << 20
"""The largest message between router and workers; well above what a router takes from a client."""
HANDSHAKE_SECONDS: Final = 10.0
"""The time in which a peer must begin to speak gRPC or HTTP, or end its TLS handshake."""
HTTP_IDLE_SECONDS: Final = 75.0
"""The default of `--http-keep-alive`: longer than proxies keep connections, mostly 60 s."""
IDLE_SECONDS: Final = 60.0
"""The time that a client's connection may be without a call."""


class MethodAccess(StrEnum):
    """The callers that may call a method."""

    ANYBODY = "anybody"
    TOKEN = "any token"  # noqa: S105
    GENERATE = "generate"
    """A token with this right."""
    ADMIN = "admin"
    """A token with this right."""
    CLUSTER = "the cluster"
    """A router or a worker, with the cluster's certificate where there is one."""


class ServingOrder(StrEnum):
    """The order in which the calls of several callers are served."""

    AT_ONCE = "at once"
    """No order: calls are cheap, and served as they come."""
    LIVE = "a live request"
    """Prompts are tokenized by turns; a new request takes one of `--max-live-requests`."""
    TEXTS = "texts, in rotation"
    """Threads serve one call of each caller in turn, short texts beside long ones."""
    WORKERS = "workers, in rotation"
    """A few calls at a time ask the workers, one of each caller in turn."""
    PIECES = "in pieces"
    """The answer is built in pieces, and others are served in between."""


@dataclass(frozen=True, slots=True)
class MethodRule:
    """The bounds on the calls of one method."""

    access: MethodAccess
    most_bytes: int | None = None
    """The largest message; None: that of the listener."""
    receive_seconds: float = 20.0
    """The time in which the message must arrive."""
    most_of_a_caller: int | None = 64
    """The most open calls of a caller, more are refused; None: the bound of live requests."""
    most: int | None = 1024
    """The most open calls; for one more the unread answer that waited longest is given up."""
    answer_seconds: float | None = 20.0
    """The time an answer may wait to be read; None: `--read-timeout`, or as long as the stream."""
    order: ServingOrder = ServingOrder.AT_ONCE
    stream_seconds: float | None = None
    """The longest life of a call that sends several messages; None: any."""


@dataclass(frozen=True, slots=True)
class ListenerRule:
    """The bounds on the connections of one kind of listener, and the rules of its methods."""

    methods: Mapping[str, MethodRule]
    cost: str
    """The work that a call may cause before its caller is known."""
    most_bytes: int | None = None
    """The largest message of any method; None: twice `--max-message-bytes`."""
    most_connections: int | None = None
    """The most connections; None: half of the files that the process may open."""
    begin_seconds: float = HANDSHAKE_SECONDS
    """The time in which a connection must begin to speak, and a head must arrive."""
    idle_seconds: float | None = IDLE_SECONDS
    """The time that a connection may be without a call; None: any."""
    most_head_bytes: int = 16 * KIB
    """The largest head of a call: its path and its headers."""
    most_receiving: int = 64
    """The most messages that arrive at once. One more ends the longest of whoever has the most."""
    most_receiving_of_strangers: int = 16
    """The same for methods that anybody may call; 0: none of them has a message."""
    most_streams: int = 1024
    """The most open calls of a connection that speaks gRPC."""


_INFERENCE: Final = "/kvrelay.v1.InferenceService/"
_ADMIN: Final = "/kvrelay.v1.AdminService/"
_CONTROLLER: Final = "/kvrelay.v1.ControllerService/"
_WORKER: Final = "/kvrelay.v1.WorkerService/"
_HAND_OVER: Final = "/kvrelay.v1.HandOverService/"
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = ".ServerReflection/ServerReflectionInfo"

_LIVE: Final = MethodRule(
    MethodAccess.GENERATE,
    most_of_a_caller=None,
    most=None,
    answer_seconds=None,
    order=ServingOrder.LIVE,
)
_TEXT: Final = MethodRule(
    MethodAccess.GENERATE, most_of_a_caller=1024, most=4096, order=ServingOrder.TEXTS
)
_SHOWN: Final = MethodRule(MethodAccess.TOKEN, most_bytes=KIB)
_OPERATED: Final = MethodRule(MethodAccess.ADMIN, most_of_a_caller=256, most=512)
_SPOKEN: Final = MethodRule(
    MethodAccess.CLUSTER, most_of_a_caller=None, most=None, answer_seconds=None
)
_ASKED: Final = MethodRule(
    MethodAccess.ANYBODY,
    most_bytes=KIB,
    receive_seconds=5.0,
    most_of_a_caller=16,
    most=256,
    answer_seconds=5.0,
)
_HEALTH_RULES: Final = {f"{_HEALTH}Check": _ASKED, f"{_HEALTH}Watch": _ASKED}
_REFLECTED: Final = {
    f"/grpc.reflection.{version}{_REFLECTION}": MethodRule(
        MethodAccess.TOKEN, most_bytes=KIB, most_of_a_caller=8, most=64, stream_seconds=60.0
    )
    for version in ("v1", "v1alpha")
}
_BEFORE_KNOWN: Final = "a head is read, and a token hashed"

GRPC: Final = ListenerRule(
    {
        f"{_INFERENCE}Generate": _LIVE,
        f"{_INFERENCE}Abort": MethodRule(MethodAccess.GENERATE, most_bytes=KIB),
        f"{_INFERENCE}Tokenize": _TEXT,
        f"{_INFERENCE}Detokenize": _TEXT,
        f"{_INFERENCE}GetModelInfo": _SHOWN,
        f"{_INFERENCE}GetServerInfo": _SHOWN,
        f"{_INFERENCE}GetLoads": _SHOWN,
        f"{_INFERENCE}OpenSession": MethodRule(
            MethodAccess.GENERATE, most_of_a_caller=64, order=ServingOrder.WORKERS
        ),
        f"{_INFERENCE}CloseSession": MethodRule(MethodAccess.GENERATE, most_bytes=KIB),
        f"{_INFERENCE}GetSessions": MethodRule(
            MethodAccess.GENERATE,
            most_bytes=KIB,
            most_of_a_caller=8,
            most=64,
            order=ServingOrder.PIECES,
        ),
        **_HEALTH_RULES,
        **_REFLECTED,
    },
    _BEFORE_KNOWN,
)
"""The router's listener for gRPC clients."""

OPERATORS: Final = ListenerRule(
    {
        f"{_ADMIN}DrainWorker": _OPERATED,
        f"{_ADMIN}ScaleWorkers": _OPERATED,
        f"{_ADMIN}RollWorkers": _OPERATED,
        f"{_ADMIN}ShiftRouters": _OPERATED,
        f"{_CONTROLLER}GetCluster": _OPERATED,
        f"{_CONTROLLER}WatchWorkers": MethodRule(
            MethodAccess.ADMIN, most_of_a_caller=1024, most=1024
        ),
        **_REFLECTED,
    },
    _BEFORE_KNOWN,
    most_bytes=64 * KIB,
)
"""The listener for operators and for other routers, of a router or of a controller."""

WORKER: Final = ListenerRule(
    {
        f"{_WORKER}Attach": _SPOKEN,
        f"{_WORKER}GetPageOwners": MethodRule(
            MethodAccess.CLUSTER, most_bytes=KIB, most_of_a_caller=4
        ),
        f"{_WORKER}FindHistory": MethodRule(MethodAccess.CLUSTER, most_bytes=KIB),
        f"{_HAND_OVER}DescribeAgent": MethodRule(
            MethodAccess.CLUSTER, most_bytes=KIB, most_of_a_caller=1024
        ),
        f"{_HAND_OVER}HandOver": _SPOKEN,
        **_HEALTH_RULES,
    },
    "a certificate is checked",
    most_bytes=MAX_MESSAGE_BYTES,
    idle_seconds=None,
)
"""A worker's listener: for routers, for decode workers, and for health checks."""

_READ: Final = MethodRule(MethodAccess.TOKEN, most_bytes=0, answer_seconds=None)
_OPEN: Final = MethodRule(
    MethodAccess.ANYBODY, most_bytes=0, most_of_a_caller=1, most=4096, answer_seconds=None
)
"""The rule of a path for strangers: a connection serves one call after the other."""

HTTP: Final = ListenerRule(
    {
        "POST /v1/completions": _LIVE,
        "POST /v1/chat/completions": _LIVE,
        "POST /v1/responses": _LIVE,
        "POST /v1/messages": _LIVE,
        "POST /v1/messages/count_tokens": MethodRule(
            MethodAccess.GENERATE,
            most_of_a_caller=1024,
            most=4096,
            answer_seconds=None,
            order=ServingOrder.TEXTS,
        ),
        "POST /v1/sessions": MethodRule(
            MethodAccess.GENERATE,
            most_of_a_caller=64,
            answer_seconds=None,
            order=ServingOrder.WORKERS,
        ),
        "GET /v1/sessions": MethodRule(
            MethodAccess.GENERATE,
            most_bytes=0,
            most_of_a_caller=8,
            most=64,
            answer_seconds=None,
            order=ServingOrder.PIECES,
        ),
        "DELETE /v1/sessions/{session:path}": MethodRule(
            MethodAccess.GENERATE, most_bytes=0, answer_seconds=None
        ),
        "POST /tokenize": MethodRule(
            MethodAccess.GENERATE,
            most_of_a_caller=1024,
            most=4096,
            answer_seconds=None,
            order=ServingOrder.TEXTS,
        ),
        "POST /detokenize": MethodRule(
            MethodAccess.GENERATE,
            most_of_a_caller=1024,
            most=4096,
            answer_seconds=None,
            order=ServingOrder.TEXTS,
        ),
        "GET /tokenizer_info": _READ,
        "GET /v1/models": _READ,
        "GET /v1/models/{model:path}": _READ,
        "GET /version": _READ,
        "GET /metrics": MethodRule(
            MethodAccess.ADMIN, most_bytes=0, most_of_a_caller=8, most=16, answer_seconds=None
        ),
        "GET /live": MethodRule(
            MethodAccess.ADMIN, most_bytes=0, most_of_a_caller=16, most=16, answer_seconds=None
        ),
        "GET /openapi.json": _READ,
        "GET /": _OPEN,
        "GET /health": _OPEN,
        "GET /ready": _OPEN,
        "GET /ping": _OPEN,
        "POST /ping": _OPEN,
    },
    "a head is parsed, and a token hashed",
    most_connections=4096,
    most_head_bytes=64 * KIB,
    idle_seconds=HTTP_IDLE_SECONDS,
    most_receiving_of_strangers=0,
)
"""The router's listener for HTTP; no answer but a stream outlives `--read-timeout` unread."""

_SCRAPED: Final = MethodRule(
    MethodAccess.ANYBODY,
    most_bytes=0,
    receive_seconds=10.0,
    most_of_a_caller=1,
    most=512,
    answer_seconds=10.0,
)

METRICS: Final = ListenerRule(
    {"GET /metrics": _SCRAPED, "GET /sd": _SCRAPED},
    "a page is made, on a thread of its own",
    most_connections=512,
    idle_seconds=10.0,
    most_receiving=0,
    most_receiving_of_strangers=0,
)
"""Everybody's listener for Prometheus. A connection has one call."""

KV_EVENTS: Final = ListenerRule(
    {
        "SUBSCRIBE": MethodRule(
            MethodAccess.ANYBODY,
            most_bytes=256,
            most_of_a_caller=1024,
            most=1024,
            answer_seconds=None,
        )
    },
    "a topic is noted",
    most_bytes=256,
    most_connections=ANY_NUMBER,
    idle_seconds=None,
    most_head_bytes=256,
    most_receiving=0,
    most_receiving_of_strangers=0,
)
"""A worker's socket of KV events, on loopback alone; a method is a subscription to a topic."""

LISTENERS: Final[Mapping[str, ListenerRule]] = {
    "gRPC": GRPC,
    "HTTP": HTTP,
    "operators": OPERATORS,
    "worker": WORKER,
    "metrics": METRICS,
    "KV events": KV_EVENTS,
}
