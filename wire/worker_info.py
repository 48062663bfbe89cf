"""The description of a worker that every process of the cluster sees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.wire.model_digest import ModelDigest


class WorkerRole(StrEnum):
    """The part that a worker has in a request."""

    PREFILL = "prefill"
    """The worker computes prompts and hands their KV over."""
    DECODE = "decode"
    """The worker takes KV over and generates."""
    AGGREGATED = "aggregated"
    """The worker does both: the baseline."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker: what it is, where to reach it, what it can take.

    The worker reports this once it has started, and `deploy` lists it for the routers.
    """

    name: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: WorkerRole
    incarnation: str
    """The name of this start of the worker: every start has a new one."""
    address: str
    """``host:port`` of its gRPC services."""
    metrics_address: str
    """``host:port`` of its Prometheus metrics."""
    pool_tokens: int
    """The most tokens that one request can hold there."""
    max_model_len: int
    """The most tokens of prompt and output together."""
    vocab_size: int
    architecture: str
    eos_token_ids: tuple[int, ...]
    model: ModelDigest
    """The digests of what the incarnation has loaded."""
    version: str
    """The version of kvrelay; routers of another version send it nothing."""
    kv_events_address: str = ""
    """``host:port`` where it publishes KV events; empty if it does not."""
    pid: int = 0
    """The process id, on its own machine; 0 where nobody has to know it."""
    draining: bool = False
    """The worker gets no more requests.

    Requests that no other worker can take wait for its successor. Until that one is there, the
    worker
    stays listed, alive or not.
    """
    locality: str = ""
    """The worker's place (``--near``): workers of one place are near each other; empty: unknown."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where one incarnation of a worker is reached."""

    address: str
    """``host:port`` of its gRPC services."""
    incarnation: str
